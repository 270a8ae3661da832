// From codes of latents to operands, for all kernels.
#pragma once
#include "latent/format.cuh"

// A slice of 16 tokens as four matrices of 8 tokens x 8 dimensions: tokens 0-7 and 8-15 of its first 8 dimensions, then
// of the last 8. OFFSET is added to all levels.
DEVICE void latent_matrices(u32 low, u32 high, Table table, const LevelTable& levels, u32 (&a)[4]) {
  if constexpr (IN_BYTES) {
    u32 first, second;
    code_bytes<LLOYD, L_BITS>(low, high, table, first, second);
    const u32 base = 0x64646464u, less = 0x643F643Fu;  // 1024 + level + 63.5, less 1087
    a[0] = sub_f16x2(prmt(first, base, 0x4140), less), a[2] = sub_f16x2(prmt(first, base, 0x4342), less);
    a[1] = sub_f16x2(prmt(second, base, 0x4140), less), a[3] = sub_f16x2(prmt(second, base, 0x4342), less);
  } else {
    code_halves<L_KIND, L_BITS, false>(low, high, table, levels, a);
  }
}

// The rope parts of 16 tokens: raw numbers, or codes as bytes, of the first 8 tokens and then of the last.
struct RopeCodes {
  static constexpr int OF_SLICE = R_KIND == RAW ? 4 : 2, WORDS = OF_SLICE * ROPE_SLICES;
  u32 words[WORDS];

  DEVICE_MEMBER const u32* of_slice(int s) const { return words + OF_SLICE * s; }
  DEVICE_MEMBER void load(const u8* tile, int lane) {
    if constexpr (R_BITS % 8 == 0) {
      Plane<4, 8, true>::load_words<WORDS>(tile, lane, words);
    } else {
      Codes<(R_BITS < 8 ? R_BITS : 7), ROPE_SLICES, true> codes;
      codes.load(tile, lane);
      UNROLL_FOR (int i = 0; i < ROPE_SLICES; i++) {
        const u32 low = codes.low(i), high = codes.high(i);
        const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4;
        const u32 odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
        words[2 * i] = prmt(even, odd, 0x5140), words[2 * i + 1] = prmt(even, odd, 0x7362);
      }
    }
  }
};
