// e4m3 codes with a power-of-two scale.
#pragma once
#include "store/format.cuh"

struct Fp8Scale {
  u32 field;
  float up;  // the factor before rounding to e4m3; 0: all codes are zero
  // largest: the bits of the largest magnitude.
  DEVICE_MEMBER explicit Fp8Scale(u32 largest) {
    u32 exponent = largest >> 23;
    bool zero = exponent < LEAST_EXPONENT;
    u32 largest_exponent = zero ? LEAST_EXPONENT : exponent < 254 ? exponent : 254;
    u32 shifted = largest_exponent - 8 + ((largest & 0x7FFFFF) > 0x600000 ? 1 : 0);
    field = exponent == 255 ? INVALID_FIELD : zero ? 0 : encode_unsigned(as_float(shifted << 23));
    up = zero || exponent == 255 ? 0.0f : as_float((254 - shifted) << 23);
  }
};

DEVICE u32 fp8_code(float x, float up) {
  float scaled = up == 0.0f ? 0.0f : mul_rn(x, up);
  u32 bits = as_bits(scaled), magnitude = bits & 0x7FFFFFFFu;
  u32 normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  u32 tiny = (u32)f32_to_i32_rz(sub_rn(add_rn(mul_rn(as_float(magnitude), 512.0f), 12582912.0f), 12582912.0f));
  // As in e4m3, a negative zero keeps its sign, unless the whole vector is zero.
  return (magnitude < (121u << 23) ? tiny : normal) | (bits >> 24 & 0x80);
}
