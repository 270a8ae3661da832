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

// 6- and 7-bit codes of a slice of rope parts as bytes, for the first or the last 8 tokens.
DEVICE u32 rope_code_bytes(u32 low, u32 high, int half) {
  const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4;
  const u32 odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
  return prmt(even, odd, half ? 0x7362 : 0x5140);
}
