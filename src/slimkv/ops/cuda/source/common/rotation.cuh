// Rotating one vector in the registers of a warp: lane l holds dimensions l, l + 32, ...
#pragma once
#include "common/numbers.cuh"

#define POWER_OF_TWO(n) (((n) & ((n) - 1)) == 0)

DEVICE float sign_at(const u16* signs, int i) { return as_float((u32)signs[i] << 16); }

// The Hadamard transform of Sylvester's matrix, a power of two of at least 32.
template <int D> DEVICE void hadamard(float (&x)[(D + 31) / 32], int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const float other = shfl_xor(x[i], d);
      x[i] = lane & d ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int d = 1; d < D / 32; d <<= 1)
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
}

// x times the matrix of signs (rows are original dimensions), or with BACK its transpose, and `norm`.
template <int D, bool BACK>
DEVICE void multiply_by_signs(float (&x)[(D + 31) / 32], const u16* signs, float norm, float* scratch, int lane) {
  constexpr int N = (D + 31) / 32;
  sync_warp();
#pragma unroll
  for (int i = 0; i < N; i++)
    if (lane + 32 * i < D) scratch[lane + 32 * i] = x[i] * norm, x[i] = 0;
  sync_warp();
  for (int j = 0; j < D; j++)
#pragma unroll
    for (int i = 0; i < N; i++)
      if (lane + 32 * i < D) x[i] += scratch[j] * sign_at(signs, BACK ? (lane + 32 * i) * D + j : j * D + lane + 32 * i);
  sync_warp();
}

// x times the rotation: powers of two by its random signs (bits), others by its whole matrix (signs). scratch: D floats of
// this warp's own.
template <int D>
DEVICE void rotate(float (&x)[(D + 31) / 32], const u32* bits, const u16* signs, float norm, float* scratch, int lane) {
  if (POWER_OF_TWO(D) && D >= 32) {
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++) x[i] = signed_by(x[i] * norm, bits[i], lane);
    hadamard<D>(x, lane);
  } else {
    multiply_by_signs<D, false>(x, signs, norm, scratch, lane);
  }
}

// The other way.
template <int D>
DEVICE void unrotate(float (&x)[(D + 31) / 32], const u32* bits, const u16* signs, float norm, float* scratch, int lane) {
  if (POWER_OF_TWO(D) && D >= 32) {
    hadamard<D>(x, lane);
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++) x[i] = signed_by(x[i] * norm, bits[i], lane);
  } else {
    multiply_by_signs<D, true>(x, signs, norm, scratch, lane);
  }
}
