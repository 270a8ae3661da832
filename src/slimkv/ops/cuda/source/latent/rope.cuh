// Rope parts of 16 tokens in a warp's registers, and what else its lanes read of those tokens.
#pragma once
#include "common/hopper.cuh"
#include "latent/codes.cuh"

// The 16-bit fields of tokens g and g + 8 in the halves of a word; zero beyond the sequence, which has `left` tokens from `place` on.
DEVICE u32 fields_of(const u8* fields, int place, int left, int g) {
  const u32 low = g < left ? field_bits(fields, place + g) : 0, high = g + 8 < left ? field_bits(fields, place + g + 8) : 0;
  return low | high << 16;
}

// Codes of the 16 tokens from `place` on, on their way to the L2 cache.
DEVICE void prefetch_codes(const u8* page, int place, int lane) {
  const u8* latents = page + place / 16 * L_TILE;
  const u8* ropes = page + R_CODES + place / 16 * R_TILE;
#pragma unroll
  for (int at = 0; at < L_TILE; at += 32 * 128)
    if (at + 128 * lane < L_TILE) prefetch_l2(latents + at + 128 * lane);
  if (128 * lane < R_TILE) prefetch_l2(ropes + 128 * lane);
}

struct RopeCodes {
  static constexpr int WORDS = R_BITS % 8 ? 2 * ROPE_SLICES : ROPE_SLICES * R_BITS / 4;  // codes of 6 and 7 bits as bytes
  u32 words[WORDS];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = 0;
  }
  DEVICE_MEMBER void load(const u8* tile, int lane) {
    if constexpr (R_BITS % 8 == 0) {
      Plane<4, 8, true>::load_words<WORDS>(tile, lane, words);
    } else {
      Codes<(R_BITS < 8 ? R_BITS : 7), ROPE_SLICES, true> codes;
      codes.load(tile, lane);
#pragma unroll
      for (int s = 0; s < ROPE_SLICES; s++) set_codes(s, codes.low(s), codes.high(s));
    }
  }
  DEVICE_MEMBER void set_codes(int s, u32 low, u32 high) {
    const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4, odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
    words[2 * s] = prmt(even, odd, 0x5140), words[2 * s + 1] = prmt(even, odd, 0x7362);
  }

  // Slice s as pages have it: dimensions x tokens.
  template <class Levels> DEVICE_MEMBER void matrices(int s, Table table, const Levels& levels, u32 (&v)[4]) const {
    if constexpr (R_KIND == RAW) {
      const u32* w = words + 4 * s;  // a token's dimensions g and g + 8
      v[0] = prmt(w[0], w[1], 0x5410), v[1] = prmt(w[0], w[1], 0x7632);
      v[2] = prmt(w[2], w[3], 0x5410), v[3] = prmt(w[2], w[3], 0x7632);
    } else {
      code_halves<R_KIND, 8, true>(words[2 * s], words[2 * s + 1], table, levels, v);
    }
  }
  // The same as an operand: tokens x dimensions.
  template <class Levels> DEVICE_MEMBER void operand(int s, Table table, const Levels& levels, u32 (&a)[4]) const {
    u32 v[4];
    matrices(s, table, levels, v);
    a[0] = movmatrix_trans(v[0]), a[1] = movmatrix_trans(v[2]), a[2] = movmatrix_trans(v[1]), a[3] = movmatrix_trans(v[3]);
  }
};
