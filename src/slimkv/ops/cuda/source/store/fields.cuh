// The 16-bit numbers that pages store beside the codes (see slimkv.codec.scale16).
#pragma once
#include "common/types.cuh"

DEVICE u32 encode_unsigned(float x) {
  u32 bits = as_bits(x);
  i32 rounded = (i32)((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (87 << 10);
  bool over = rounded >= (i32)INVALID_FIELD || (bits & 0x7F800000u) == 0x7F800000u;
  return over ? INVALID_FIELD : rounded < 1 << 10 ? 0 : (u32)rounded;
}
DEVICE float decode_unsigned(u32 code) { return mul_rn(as_float(code << 13), 1.547425049106725e26f); }  // 2^87
