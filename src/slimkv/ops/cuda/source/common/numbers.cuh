// Constants, and single numbers: of the three types that queries have, and with a sign of the rotation.
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

// x times the random sign of a dimension: bit i of its word.
DEVICE float signed_by(float x, u32 bits, int i) { return as_float(as_bits(x) ^ ((bits >> i) << 31)); }
