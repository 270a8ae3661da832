// The 16-bit numbers that pages store beside the codes (see slimkv.codec.scale16).
#pragma once
#include "common/types.cuh"

DEVICE u32 encode_unsigned(float x) {
  u32 bits = as_bits(x);
  i32 rounded = (i32)((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (87 << 10);
  bool over = rounded >= (i32)INVALID_FIELD || (bits & 0x7F800000u) == 0x7F800000u;
  return over ? INVALID_FIELD : rounded < 1 << 10 ? 0 : (u32)rounded;
}
DEVICE u32 encode_signed(float x) {
  u32 bits = as_bits(x), magnitude = bits & 0x7FFFFFFFu;
  i32 rounded = (i32)((magnitude + 0x1FFF + (magnitude >> 14 & 1)) >> 14) - (87 << 9);
  if ((bits & 0x7F800000u) == 0x7F800000u || rounded >= 0x7FFF) return INVALID_FIELD;
  return rounded < 1 << 9 ? 0 : (u32)rounded | (bits >> 16 & 0x8000u);
}
DEVICE float decode_unsigned(u32 code) { return mul_rn(as_float(code << 13), 1.547425049106725e26f); }  // 2^87
DEVICE float decode_signed(u32 code) {
  return mul_rn(as_float((code & 0x7FFF) << 14 | (code & 0x8000) << 16), 1.547425049106725e26f);
}
