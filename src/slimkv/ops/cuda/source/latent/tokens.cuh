// 16 tokens of a warp: their codes in registers, and as rows of operands (tokens x 64 dimensions) in shared memory.
#pragma once
#include "latent/rope.cuh"

// Of a tile's tokens: the scale of the latent and its reciprocal, its base-2 logarithm, and the scale of the rope part in units
// of the latent's. A scale of zero counts as a very small one; a token that is no number has such a scale.
struct __attribute__((aligned(16))) TokenScales {
  float scale[64], inverse[64], log[64], rope[R_KIND == RAW ? 4 : 64];

  DEVICE_MEMBER void put(int token, u32 field, u32 rope_field) {
    const bool marked = field == INVALID_FIELD || rope_field == INVALID_FIELD;
    const float own = marked ? 1.0f : scale_of(field), rope_scale = marked || R_KIND == RAW ? 1.0f : scale_of(rope_field);
    const float least = max_f32(max_f32(own, rope_scale * 8.6736174e-19f), 8.6736174e-19f), over = rcp_approx(least);  // 2^-60
    scale[token] = marked ? NOT_A_NUMBER : least, inverse[token] = over, log[token] = log2_approx(least);
    if (R_KIND != RAW) rope[token] = rope_scale * over;
  }
};

struct Tokens {
  Codes<L_BITS, S, false> latent;
  RopeCodes rope;
  u32 fields, rope_fields;  // of tokens g and g + 8 in the halves of a word; zero beyond the sequence

  // 16 tokens of a page from `place` on, of which the sequence has `left`.
  DEVICE_MEMBER void load(const u8* page, int place, int left, int lane) {
    fields = rope_fields = 0;
    if (left <= 0) {  // codes that tables have
      latent = {};
      rope.clear();
      return;
    }
    latent.load(page + place / 16 * L_TILE, lane);
    rope.load(page + R_CODES + place / 16 * R_TILE, lane);
    fields = fields_of(page + L_FIELDS, place, left, lane >> 2);
    if (R_KIND != RAW) rope_fields = fields_of(page + R_FIELDS, place, left, lane >> 2);
  }
  // What `load` is going to read of other 16 tokens, on its way to the L2 cache.
  DEVICE_MEMBER static void prefetch(const u8* page, int place, int left, int lane) {
    if (left <= 0) return;
    prefetch_codes(page, place, lane);
    if (lane == 31) prefetch_l2(page + L_FIELDS + 2 * place);
    if (R_KIND != RAW && lane == 30) prefetch_l2(page + R_FIELDS + 2 * place);
  }

  // Levels of latents and rope parts to rows at `to` (shared memory; `rope_to` of the rope part), where 8 KiB have 64 dimensions of a
  // tile of 64 tokens, and the tokens' scales.
  template <class Levels>
  DEVICE_MEMBER void unpack(Table table, const LevelTable& levels, const Levels& rope_levels, u32 to, u32 rope_to, TokenScales& scales,
                            int first, int lane) const {
    if (lane % 4 < 2) {
      const int by = 16 * (lane % 4);
      scales.put(first + lane / 4 + by / 2, fields >> by & 0xFFFF, rope_fields >> by & 0xFFFF);
    }
    const u32 row = lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4);  // slice s of 64 dimensions is at this ^ 32 s
#pragma unroll
    for (int s = 0; s < ROPE_SLICES; s++) {
      u32 a[4];
      rope.operand(s, table, rope_levels, a);
      stmatrix_x4<0>(rope_to + s / 4 * 8192 + (row ^ s % 4 * 32), a[0], a[1], a[2], a[3]);
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
      u32 a[4];
      latent_matrices(latent.low(s), L_BITS > 4 ? latent.high(s) : 0, table, levels, a);
#pragma unroll
      for (int m = 0; m < 4; m++)
        if (OFFSET != 0.0f) a[m] = sub_f16x2(a[m], 0x38003800u);  // one half
      stmatrix_x4<0>(to + s / 4 * 8192 + (row ^ s % 4 * 32), a[0], a[1], a[2], a[3]);
    }
  }
};
