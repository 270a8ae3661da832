// 16 tokens of a warp: their codes in registers, and as rows of operands (tokens x 64 dimensions) in shared memory.
#pragma once
#include "common/hopper.cuh"
#include "latent/codes.cuh"

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
  static constexpr int ROPE_WORDS = R_BITS % 8 ? 2 * ROPE_SLICES : ROPE_SLICES * R_BITS / 4;  // codes of 6 and 7 bits as bytes
  Codes<L_BITS, S, false> latent;
  u32 rope[ROPE_WORDS];
  u32 fields, rope_fields;  // of tokens g and g + 8 in the halves of a word; zero beyond the sequence

  // 16 tokens of a page from `place` on, of which the sequence has `left`.
  DEVICE_MEMBER void load(const u8* page, int place, int left, int lane) {
    fields = rope_fields = 0;
    if (left <= 0) {  // codes that tables have
      latent = {};
#pragma unroll
      for (int i = 0; i < ROPE_WORDS; i++) rope[i] = 0;
      return;
    }
    latent.load(page + place / 16 * L_TILE, lane);
    load_rope(page + R_CODES + place / 16 * R_TILE, lane);
    fields = fields_of(page + L_FIELDS, place, left, lane >> 2);
    if (R_KIND != RAW) rope_fields = fields_of(page + R_FIELDS, place, left, lane >> 2);
  }
  // What `load` is going to read of other 16 tokens, on its way to the L2 cache.
  DEVICE_MEMBER static void prefetch(const u8* page, int place, int left, int lane) {
    if (left <= 0) return;
    const u8* latents = page + place / 16 * L_TILE;
    const u8* ropes = page + R_CODES + place / 16 * R_TILE;
#pragma unroll
    for (int at = 0; at < L_TILE; at += 32 * 128)
      if (at + 128 * lane < L_TILE) prefetch_l2(latents + at + 128 * lane);
    if (128 * lane < R_TILE) prefetch_l2(ropes + 128 * lane);
    if (lane == 31) prefetch_l2(page + L_FIELDS + 2 * place);
    if (R_KIND != RAW && lane == 30) prefetch_l2(page + R_FIELDS + 2 * place);
  }
  DEVICE_MEMBER static u32 fields_of(const u8* fields, int place, int left, int g) {
    const u32 low = g < left ? field_bits(fields, place + g) : 0, high = g + 8 < left ? field_bits(fields, place + g + 8) : 0;
    return low | high << 16;
  }
  DEVICE_MEMBER void load_rope(const u8* tile, int lane) {
    if constexpr (R_BITS % 8 == 0) {
      Plane<4, 8>::load_words<ROPE_WORDS>(tile, lane, rope);
    } else {
      Codes<(R_BITS < 8 ? R_BITS : 7), ROPE_SLICES, true> codes;
      codes.load(tile, lane);
#pragma unroll
      for (int s = 0; s < ROPE_SLICES; s++) set_codes(s, codes.low(s), codes.high(s));
    }
  }
  DEVICE_MEMBER void set_codes(int s, u32 low, u32 high) {
    const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4, odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
    rope[2 * s] = prmt(even, odd, 0x5140), rope[2 * s + 1] = prmt(even, odd, 0x7362);
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
      u32 v[4], a[4];
      if constexpr (R_KIND == RAW) {
        const u32* w = rope + 4 * s;  // a token's dimensions g and g + 8
        v[0] = prmt(w[0], w[1], 0x5410), v[1] = prmt(w[0], w[1], 0x7632);
        v[2] = prmt(w[2], w[3], 0x5410), v[3] = prmt(w[2], w[3], 0x7632);
      } else {
        code_halves<R_KIND, 8, true>(rope[2 * s], rope[2 * s + 1], table, rope_levels, v);
      }
      a[0] = movmatrix_trans(v[0]), a[1] = movmatrix_trans(v[2]), a[2] = movmatrix_trans(v[1]), a[3] = movmatrix_trans(v[3]);
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
