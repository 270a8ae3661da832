// Codes to numbers.
#pragma once
#include "latent/format.cuh"

// Levels of the rope part, in COPIES copies.
template <int COPIES> struct RopeLevels {
  u32 address;
  DEVICE_MEMBER u32 at(u32 word, int i) const {
    return ld_shared_constant(dp4a_u8(word, (u32)(4 * COPIES) << (8 * i), address));
  }
};

// The same in one copy, as halves side by side.
struct PackedRopeLevels {
  u32 address;
  DEVICE_MEMBER u32 at(u32 word, int i) const { return ld_shared_constant_half(dp4a_u8(word, 2u << (8 * i), address)); }
};

template <int COUNT, int THREADS> DEVICE void fill_packed_levels(const float* levels, u8* to) {
  for (int i = thread_index(); i < COUNT; i += THREADS) ((u16*)to)[i] = (u16)f32_to_f16(levels[i]);
}
template <int COUNT, int COPIES, int THREADS> DEVICE void fill_levels(const float* levels, u8* to) {
  for (int i = thread_index(); i < COUNT * COPIES; i += THREADS) ((u32*)to)[i] = f32_to_f16(levels[i / COPIES]);
}

// A slice of 16 tokens as four matrices of 8 tokens x 8 dimensions: tokens 0-7 and 8-15 of its first dimensions, then of the
// others. With OFFSET.
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

// The exponent, as floats have it, of the largest of a row's numbers, lane, lane + 32, ...; LEAST at least.
template <int DIM, int LEAST> DEVICE int exponent_of_row(const float (&x)[DIM / 32]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
#pragma unroll
  for (int d = 16; d; d >>= 1) most = max_f32(most, shfl_xor(most, d));
  return min_i32(max_i32((int)(as_bits(most) >> 23), LEAST), 253);
}

DEVICE float marked_scale(u32 field) { return field == INVALID_FIELD ? NOT_A_NUMBER : scale_of(field); }
