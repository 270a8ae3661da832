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
  if (lane == 0) cp_async_bulk_prefetch(latents, L_TILE), cp_async_bulk_prefetch(ropes, R_TILE);
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
      Plane<4, 8>::load_words<WORDS>(tile, lane, words);
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

  // Slice s, which pages have dimensions x tokens, as an operand: tokens x dimensions.
  template <class Levels> DEVICE_MEMBER void operand(int s, Table table, const Levels& levels, u32 (&a)[4]) const {
    u32 v[4];
    if constexpr (R_KIND == RAW) {
      const u32* w = words + 4 * s;  // a token's dimensions g and g + 8
      v[0] = prmt(w[0], w[1], 0x5410), v[1] = prmt(w[0], w[1], 0x7632);
      v[2] = prmt(w[2], w[3], 0x5410), v[3] = prmt(w[2], w[3], 0x7632);
    } else {
      code_halves<R_KIND, 8, true>(words[2 * s], words[2 * s + 1], table, levels, v);
    }
    a[0] = movmatrix_trans(v[0]), a[1] = movmatrix_trans(v[2]), a[2] = movmatrix_trans(v[1]), a[3] = movmatrix_trans(v[3]);
  }
};

// The same as operands without `movmatrix`: a page has dimensions d and d + 8 of a token side by side, which is a pair of columns where
// queries are in that order. Each pair is read by the lane that needs it.
constexpr bool ROPE_PAIRS = R_BITS % 8 == 0;
// The column of dimension d.
DEVICE int rope_column(int d) { return ROPE_PAIRS ? (d & ~15) | (d & 7) << 1 | (d >> 3 & 1) : d; }
struct RopePairs {
  u32 words[4 * ROPE_SLICES];  // [slice, half of its columns, token g or g + 8]

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < 4 * ROPE_SLICES; i++) words[i] = 0;
  }
  DEVICE_MEMBER void load(const u8* tile, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u8* const own = tile + 64 * t + 16 * (g / 2) + R_BITS / 4 * (g % 2);
#pragma unroll
    for (int s = 0; s < ROPE_SLICES; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u8* const from = own + 256 * (i / 2) + (R_BITS == 16 ? 512 * s + 8 * (i % 2) : 512 * (s / 2) + 8 * (s % 2) + 4 * (i % 2));
        words[4 * s + i] = R_BITS == 16 ? *(const u32*)from : *(const u16*)from;
      }
  }
  template <class Levels> DEVICE_MEMBER void operand(int s, Table table, const Levels& levels, u32 (&a)[4]) const {
    const u32* const w = words + 4 * s;
    if constexpr (R_KIND == RAW) {
      a[0] = w[0], a[1] = w[1], a[2] = w[2], a[3] = w[3];
    } else {
      code_halves<R_KIND, 8, true>(prmt(w[0], w[1], 0x5140), prmt(w[2], w[3], 0x5140), table, levels, a);
    }
  }
};
