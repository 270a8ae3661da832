// 16 tokens of a warp: their codes in registers, and as rows of operands (tokens x 64 dimensions) in shared memory.
#pragma once
#include "latent/rope.cuh"

// The largest exponent of a warp's fields (of tokens g and g + 8 in the halves of a word) as they are stored.
DEVICE int exponent_of_fields(u32 fields) {
  const u32 low = fields & 0xFFFF, high = fields >> 16;
  int most = max_i32(low == INVALID_FIELD ? 0 : (int)low, high == INVALID_FIELD ? 0 : (int)high);
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) most = max_i32(most, shfl_xor(most, d));
  return most >> 10;
}
// The scale of a field, twice, as halves in units of 2^(most - 40 - above). What is far smaller than the others is zero, and so is
// what is no number.
DEVICE u32 half_scale(u32 field, int most, int above) {
  const int bits = (int)field + ((15 + above - most) << 10);
  return field < 1024 || field == INVALID_FIELD || bits < 1024 ? 0 : (u32)bits * 0x10001u;
}
DEVICE float power_of_two(int exponent) { return as_float((u32)(127 + exponent) << 23); }

// Of 16 tokens: the unit of their latents and its logarithm, and the unit of rope parts in units of latents.
struct __attribute__((aligned(16))) Units { float unit, exponent, rope, unused; };

struct Tokens {
  static constexpr int ABOVE = 8;  // powers of two that scales of latents have of the range of halves
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

  // Scaled latents and rope parts to rows at `to` (shared memory; `rope_to` of the rope part), where 8 KiB have 64 dimensions of a
  // tile of 64 tokens. Tokens that are no numbers have such rope parts: nobody reads these as values.
  template <int COPIES>
  DEVICE_MEMBER Units unpack(Table table, const LevelTable& levels, const RopeLevels<COPIES>& rope_levels, u32 to, u32 rope_to, int lane) const {
    const u32 low = fields & 0xFFFF, high = fields >> 16, rope_low = rope_fields & 0xFFFF, rope_high = rope_fields >> 16;
    const int most = exponent_of_fields(fields), rope_most = R_KIND == RAW ? 40 : exponent_of_fields(rope_fields);
    const u32 scale[2] = {half_scale(low, most, ABOVE), half_scale(high, most, ABOVE)};
    const u32 less[2] = {mul_f16x2(scale[0], 0xB800B800u), mul_f16x2(scale[1], 0xB800B800u)};  // half of it
    const u32 rope_scale[2] = {half_scale(rope_low, rope_most, 0), half_scale(rope_high, rope_most, 0)};
    const bool marked[2] = {low == INVALID_FIELD || rope_low == INVALID_FIELD, high == INVALID_FIELD || rope_high == INVALID_FIELD};
    const u32 row = lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4);  // slice s of 64 dimensions is at this ^ 32 s
#pragma unroll
    for (int s = 0; s < ROPE_SLICES; s++) {
      u32 a[4];
      rope.operand(s, table, rope_levels, a);
#pragma unroll
      for (int m = 0; m < 4; m++) {
        if (R_KIND != RAW) a[m] = mul_f16x2(a[m], rope_scale[m % 2]);
        if (marked[m % 2]) a[m] = 0x7FFF7FFFu;
      }
      stmatrix_x4<0>(rope_to + s / 4 * 8192 + (row ^ s % 4 * 32), a[0], a[1], a[2], a[3]);
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
      u32 a[4];
      latent_matrices(latent.low(s), L_BITS > 4 ? latent.high(s) : 0, table, levels, a);
#pragma unroll
      for (int m = 0; m < 4; m++) a[m] = OFFSET != 0.0f ? fma_f16x2(a[m], scale[m % 2], less[m % 2]) : mul_f16x2(a[m], scale[m % 2]);
      stmatrix_x4<0>(to + s / 4 * 8192 + (row ^ s % 4 * 32), a[0], a[1], a[2], a[3]);
    }
    const int exponent = most - 40 - ABOVE;
    return {power_of_two(exponent), (float)exponent, power_of_two(rope_most - 40 - exponent), 0.0f};
  }
};
