// The exact rotation of integers on tensor cores.
//
// The matrix has entries +-1, or floats that represent them. Sums of short integers are at most 2^24, which float32
// represents exactly. Products with bytes are summed in 32 bits and combined by shifts.
#pragma once
#include "store/integers.cuh"

template <class F> DEVICE void multiply(i32 c[2][4], const u32 d[2][2], Words4 m, int kind) {
  UNROLL_FOR (int i = 0; i < 2; i++) {
    if constexpr (F::VALUES) {  // rows are dimensions, columns tokens 8 i .. 8 i + 7
      if (kind == 0) mma_s8_s8(c[i], m.x, m.y, m.z, m.w, d[i][0], d[i][1]);
      else mma_s8_u8(c[i], m.x, m.y, m.z, m.w, d[i][0], d[i][1]);
    } else {  // rows are tokens, columns dimensions 8 i .. 8 i + 7
      u32 b0 = i ? m.z : m.x, b1 = i ? m.w : m.y;
      if (kind == 0) mma_s8_s8(c[i], d[0][0], d[1][0], d[0][1], d[1][1], b0, b1);
      else mma_u8_s8(c[i], d[0][0], d[1][0], d[0][1], d[1][1], b0, b1);
    }
  }
}

DEVICE void scale(i32 c[2][4], u32 by) {
  UNROLL_FOR (int i = 0; i < 8; i++) c[i / 4][i % 4] = (i32)((u32)c[i / 4][i % 4] * by);
}

// Prefetches the matrix to L2 while a thread block waits for its first rows.
template <class F> DEVICE void prefetch_rotation(const SideArgs& side, int thread, int threads) {
  constexpr int BYTES = 2 * F::FRAGMENT_BYTES;
#pragma unroll 1
  for (int i = thread; i < BYTES / 128; i += threads) prefetch_l2(side.fragments + 128 * i);
}

// The index in the page's order of element k of accumulator i.
template <class F> DEVICE constexpr int in_page(int i, int k) {
  return F::VALUES ? 4 * i + 2 * (k & 1) + (k >> 1) : 4 * (k >> 1) + 2 * i + (k & 1);
}

template <class F> DEVICE void multiply_pairs(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (F::DTYPE == FLOAT16) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}

// The matrix for slice s of group q in fragment order, loaded early for short integers.
template <class F, bool SHORT = F::SHORT> struct Fragments {
  DEVICE_MEMBER Fragments(const SideArgs&, int, int, int) {}
};
template <class F> struct Fragments<F, true> {
  Words4 steps[2 * F::STEPS];
  DEVICE_MEMBER Fragments(const SideArgs& side, int q, int s, int lane) {
    const u8* at = side.fragments + lane * 16 + (q * F::SLICES + s) * F::STEPS * 1024;
    UNROLL_FOR (int k = 0; k < 2 * F::STEPS; k++) steps[k] = ldg_cached(at + 512 * k);
  }
};

// Multiplies each group by slice s of its part of the rotation. known: the matrix for group 0, if already loaded.
template <class F> DEVICE void multiply_slices(const Digits<F, true>& d, const SideArgs& side, int s, int lane,
    float out[F::GROUPS][8], const Fragments<F>* known) {
  UNROLL_FOR (int q = 0; q < F::GROUPS; q++) {
    const Fragments<F> matrix = q == 0 && known ? *known : Fragments<F>(side, q, s, lane);
    float c[2][4] = {};
    UNROLL_FOR (int k = 0; k < 2 * F::STEPS; k++) {
      const Words4& m = matrix.steps[k];
      const u32(&first)[4] = d.pairs[q * F::STEPS + k / 2][0];
      const u32(&second)[4] = d.pairs[q * F::STEPS + k / 2][1];
      const int w = 2 * (k % 2);
      if constexpr (F::VALUES) {  // rows are dimensions, columns tokens
        multiply_pairs<F>(c[0], m.x, m.y, m.z, m.w, first[w], first[w + 1]);
        multiply_pairs<F>(c[1], m.x, m.y, m.z, m.w, second[w], second[w + 1]);
      } else {  // rows are tokens, columns dimensions
        multiply_pairs<F>(c[0], first[w], second[w], first[w + 1], second[w + 1], m.x, m.y);
        multiply_pairs<F>(c[1], first[w], second[w], first[w + 1], second[w + 1], m.z, m.w);
      }
    }
    UNROLL_FOR (int i = 0; i < 8; i++) out[q][in_page<F>(i / 4, i % 4)] = c[i / 4][i % 4];
  }
}

template <class F> DEVICE void multiply_slices(const Digits<F, false>& d, const SideArgs& side, int s, int lane,
    i32 out[F::GROUPS][8], const Fragments<F>*) {
  UNROLL_FOR (int q = 0; q < F::GROUPS; q++) {
    const u8* at = side.fragments + lane * 16 + (q * F::SLICES + s) * F::STEPS * 512;
    Words4 ones[F::STEPS];
    UNROLL_FOR (int k = 0; k < F::STEPS; k++) ones[k] = ldg_cached(at + 512 * k);
    i32 c[2][4] = {};
    UNROLL_FOR (int k = 0; k < F::STEPS; k++)  // 2^16 top is 2^8 (64 * 4 top), or 2^15 (2 top)
      multiply<F>(c, d.top[q * F::STEPS + k], F::NARROW ? ldg_cached(at + F::FRAGMENT_BYTES + 512 * k) : ones[k], 0);
    if constexpr (!F::NARROW) scale(c, 128);
    UNROLL_FOR (int k = 0; k < F::STEPS; k++) multiply<F>(c, d.middle[q * F::STEPS + k], ones[k], 1);
    scale(c, side.by_256);
    UNROLL_FOR (int k = 0; k < F::STEPS; k++) multiply<F>(c, d.low[q * F::STEPS + k], ones[k], 1);
    UNROLL_FOR (int i = 0; i < 8; i++) out[q][in_page<F>(i / 4, i % 4)] = c[i / 4][i % 4];
  }
}

// Computes slices s, s + SLICES, ... of the rotated tile: exact sums, in the page's order.
template <class F> DEVICE void rotate_slices(const Digits<F>& d, const SideArgs& side, int s, int lane,
    typename Digits<F>::Sum out[F::GROUPS][8], const Fragments<F>* known = nullptr) {
  multiply_slices<F>(d, side, s, lane, out, known);
  UNROLL_FOR (int step = 1; step < F::GROUPS; step *= 2)
    UNROLL_FOR (int q = 0; q < F::GROUPS; q++)
      if (!(q & step))
        UNROLL_FOR (int n = 0; n < 8; n++) {
          auto a = out[q][n], b = out[q + step][n];
          if constexpr (F::SHORT) {
            out[q][n] = a + b;
            out[q + step][n] = a - b;
          } else {
            out[q][n] = step == 1 ? a * side.one + b : a + b;
            out[q + step][n] = step == 1 ? b * side.minus_one + a : a - b;
          }
        }
}
