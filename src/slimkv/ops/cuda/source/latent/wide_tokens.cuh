// The 16 tokens of a warp of wide.cu and columns.cu: their scales, and their levels.
#pragma once
#include "common/hopper.cuh"
#include "common/numbers.cuh"
#include "latent/args.cuh"
#include "latent/codes.cuh"

// The LUT of the rope part: fp16 levels, one copy.
struct RopeLevels {
  u32 address;
  DEVICE_MEMBER u32 at(u32 word, int i) const { return ld_shared_constant_half(dp4a_u8(word, 2u << (8 * i), address)); }
};
template <int THREADS> DEVICE void fill_rope_levels(const float* levels, u8* to) {
  for (int i = thread_index(); i < R_LEVELS; i += THREADS) ((u16*)to)[i] = (u16)f32_to_f16(levels[i]);
}

// A token's latent scale, its reciprocal and base-2 logarithm, and the rope part's scale relative to the latent's. A
// scale of zero counts as a very small one; a marked token has scale NaN.
struct TokenScale {
  float scale, inverse, log, rope;

  DEVICE_MEMBER TokenScale(u32 field, u32 rope_field) {
    const bool marked = field == INVALID_FIELD || rope_field == INVALID_FIELD;
    const float own = marked ? 1.0f : scale_of(field);
    const float rope_scale = marked || R_KIND == RAW ? 1.0f : scale_of(rope_field);
    const float least = max_f32(max_f32(own, rope_scale * 8.6736174e-19f), 8.6736174e-19f);  // 2^-60
    inverse = rcp_approx(least), log = log2_approx(least);
    scale = marked ? NOT_A_NUMBER : least, rope = rope_scale * inverse;
  }
};
// The scales of a KV block's tokens.
struct __attribute__((aligned(16))) TokenScales {
  float scale[KV_BLOCK], inverse[KV_BLOCK], log[KV_BLOCK], rope[R_KIND == RAW ? 4 : KV_BLOCK];

  DEVICE_MEMBER void put(int token, const TokenScale& own) {
    scale[token] = own.scale, inverse[token] = own.inverse, log[token] = own.log;
    if (R_KIND != RAW) rope[token] = own.rope;
  }
};

// The levels of codes 0-3 and 4-7 of a slice as bytes, level + 63.5. The permutation yields zero for a 4-bit code with
// the highest bit set (its sign mode), so a byte is the sum of two lookups: of codes without that bit and of codes with
// it. The sum is computed as a multiply-add, which leaves the logic units to the permutations.
DEVICE void level_bytes(u32 codes, Table table, u32& first, u32& second) {
  if constexpr (L_BITS == 4) {
    const Table negative = {table.low ^ table.signs, table.high ^ table.signs}, positive = {~table.low, ~table.high};
    const u32 one = (table.signs & 0xFF) - 127, others = codes ^ 0x88888888u;  // one: 1, but not to the compiler
    auto bytes = [&](int from) {
      return prmt(negative.low, negative.high, codes >> from) * one + prmt(positive.low, positive.high, others >> from);
    };
    first = bytes(0), second = bytes(16);
  } else {
    code_bytes<LLOYD, L_BITS>(codes, 0, table, first, second);
  }
}

// A slice of 16 tokens as in latent_matrices, but in units of LEVEL_UNIT and without OFFSET. A byte x in a half is the
// denormal number 2^-24 x; the result is 2^15 * 2^-24 (x - 63.5).
constexpr float LEVEL_UNIT = IN_BYTES ? 512.0f * L_UNIT : L_UNIT;
DEVICE void level_matrices(u32 low, u32 high, Table table, u32 (&a)[4], const LevelTable& levels = {0}) {
  if constexpr (IN_BYTES) {
    u32 first, second;
    level_bytes(low, table, first, second);
    const u32 by = 0x78007800u, less = 0xAFF0AFF0u;
    a[0] = fma_f16x2(prmt(first, 0, 0x4140), by, less), a[2] = fma_f16x2(prmt(first, 0, 0x4342), by, less);
    a[1] = fma_f16x2(prmt(second, 0, 0x4140), by, less), a[3] = fma_f16x2(prmt(second, 0, 0x4342), by, less);
  } else {
    latent_matrices(low, high, table, levels, a);
  }
}

// A lane's offset in an operand of 16 rows; slice s of every 64 dimensions is at operand_row ^ 32 s.
DEVICE u32 operand_row(int lane) { return lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4); }

// Stores slice s of rope parts to rows of an operand at `to` (shared memory), where each 8 KiB has 64 dimensions of 64
// tokens. In pages it is dimensions x tokens; a raw word has dimensions g and g + 8 of a token, two rows of a matrix.
DEVICE void store_rope(const RopeCodes& rope, int s, Table table, const RopeLevels& levels, u32 to, int lane) {
  const u32* const w = rope.of_slice(s);
  to += s / 4 * 8192;
  if constexpr (R_KIND == RAW) {
    const int token = lane & 6 | lane >> 3 & 1 | lane >> 1 & 8;
    const u32 row = token * 128 + ((lane & 1 ^ token & 7) << 4);
    stmatrix_x4_trans<0>(to + (row ^ s % 4 * 32), w[0], w[1], w[2], w[3]);
  } else {
    u32 v[4];
    code_halves<R_KIND, 8, true>(w[0], w[1], table, levels, v);
    stmatrix_x4_trans<0>(to + (operand_row(lane) ^ s % 4 * 32), v[0], v[2], v[1], v[3]);
  }
}

// Prefetches 16 tokens of a page, from `place` on, to L2.
DEVICE void prefetch_tokens(const u8* page, u32 place, int lane) {
  if (128 * lane < L_TILE) prefetch_l2(page + place / 16 * L_TILE + 128 * lane);
  if (128 * lane < R_TILE) prefetch_l2(page + R_CODES + place / 16 * R_TILE + 128 * lane);
}
