// Constants and scalar functions: loads of the three query types, signs of the rotation, soft cap, sinks.
#pragma once
#include "common/types.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY as_float(0xFF800000u)
#define NOT_A_NUMBER as_float(0x7FC00000u)

// Number i of an array.
DEVICE float load_number(const void* p, i64 i, int type) {
  if (type == FLOAT32) return ((const float*)p)[i];
  const u32 bits = ((const u16*)p)[i];
  return type == BFLOAT16 ? as_float(bits << 16) : f16_to_f32(bits);
}

// x with the random sign of a dimension, bit i of `bits`.
DEVICE float signed_by(float x, u32 bits, int i) { return as_float(as_bits(x) ^ ((bits >> i) << 31)); }

// cap tanh(x / cap) = cap - 2 cap / (e + 1) with e = exp(2 x / cap); `exponent` is x times cap_factor.
DEVICE float cap_factor(float cap) { return 2.0f * LOG2E * rcp_approx(cap); }
DEVICE float soft_cap(float exponent, float cap) {
  return fma_rn(-2.0f * cap, rcp_approx(exp2_approx(min_f32(exponent, 80.0f)) + 1.0f), cap);
}

// Adds a sink to the softmax of a row, whose maximum is in base 2. Returns the rescaling factor of the output.
DEVICE float add_sink(float sink, float& row_max, float& row_sum) {
  const float in_base_2 = sink * LOG2E, above = max_f32(row_max, in_base_2);
  const float factor = row_max == MINUS_INFINITY ? 0.0f : exp2_approx(row_max - above);
  row_sum = fma_rn(row_sum, row_sum == row_sum ? factor : 1.0f, exp2_approx(in_base_2 - above));
  row_max = above;
  return factor;
}
DEVICE float log_sum_exp(float row_max, float row_sum) {
  return row_sum == 0.0f ? MINUS_INFINITY : (row_max + log2_approx(row_sum)) * LN2;
}
DEVICE float sum_of_halves(u32 x) { return f16_to_f32(x & 0xFFFF) + f16_to_f32(x >> 16); }

// Adds and subtracts pairs of a lane's numbers that are `first`, 2 `first`, ... apart: a Hadamard transform.
template <class T, int N> DEVICE void butterflies(T (&x)[N], int first = 1) {
  UNROLL_FOR (int d = first; d < N; d <<= 1)
    UNROLL_FOR (int i = 0; i < N; i++)
      if (!(i & d)) {
        const T a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
}
