// The formats of latents and rope parts.
//
// Defines: LD, RD (dimensions of the latent and of the rope part), BLOCK_SIZE (tokens per page), ROW_STRIDE (of token
// rows; 0: tiles), L_KIND, L_BITS, L_FIELDS (the latent in a page), R_KIND, R_BITS, R_CODES, R_FIELDS, R_BF16,
// R_ROTATED (the rope part), Q_TYPE, ROPE_TYPE, OUT_TYPE; ROWS, KV_BLOCK, STAGES and SHARED_BYTES
// (ops/latent/cuda/config.py).
#pragma once
#include "common/codes.cuh"
#include "common/numbers.cuh"

constexpr int LATENT_SLICES = LD / 16, ROPE_SLICES = RD / 16;  // 16 dimensions each
constexpr int L_TILE = 2 * LD * L_BITS, R_TILE = 2 * RD * R_BITS;  // bytes of 16 tokens
constexpr bool IN_BYTES = L_KIND == LLOYD && L_BITS <= 4;  // byte permutations give levels with an offset of one half
constexpr bool BF16_ROPE = R_KIND == RAW && R_BF16;
constexpr float OFFSET = IN_BYTES ? 0.5f : 0.0f;
constexpr float L_UNIT = half_unit<L_KIND, L_BITS>(), R_UNIT = R_KIND == FP8 ? 256.0f : 1.0f;
constexpr int L_LEVELS = L_KIND == LLOYD && !IN_BYTES ? 1 << L_BITS : 0, R_LEVELS = R_KIND == LLOYD ? 1 << R_BITS : 0;
constexpr float RESCALE_THRESHOLD = 8.0f;  // powers of two by which a maximum must rise before the output is rescaled
static_assert(LD % 64 == 0 && LD <= 512 && (RD == 32 || RD == 64 || RD == 128), "sizes");
static_assert(R_KIND == RAW ? R_BITS == 16 : R_BITS >= 6, "the rope part");

// The operand column of dimension d of a latent, and vice versa: code_halves makes pairs of dimensions 8 apart.
DEVICE int place_of(int d) { return IN_BYTES ? d : (d & ~9) | (d & 1) << 3 | (d >> 3 & 1); }
