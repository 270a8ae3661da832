// Number formats: fp16, bf16, e4m3, and the two 16-bit formats of scales and zeros (codec.scale16).
#pragma once

#include <cmath>
#include <cstring>

#include "types.h"

// Reads a T from an address of any alignment.
template <typename T>
static inline T read(const void* p) {
  T out;
  memcpy(&out, p, sizeof out);
  return out;
}

template <typename To, typename From>
static inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  return read<To>(&x);
}

static inline float half_to_float(u16 h) {
  const u32 sign = (u32)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) return bits_as<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  // A multiplication rebiases the exponent: it is exact and handles subnormals.
  return bits_as<float>(bits_as<u32>(bits_as<float>(magnitude << 13) * 0x1p112f) | sign);
}

static inline u16 float_to_half(float f) {
  const u32 bits = bits_as<u32>(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return (u16)(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return (u16)(sign | 0x7C00);  // rounds to infinity
  if (magnitude < 0x38800000) {                              // subnormal: adding 0.5 moves its bits to the bottom
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return (u16)(sign | (bits_as<u32>(shifted) - 0x3F000000));
  }
  return (u16)(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

static inline float bf16_to_float(u16 h) { return bits_as<float>((u32)h << 16); }

static inline u16 float_to_bf16(float f) {
  const u32 bits = bits_as<u32>(f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// |f| <= 448 -> e4m3, ties to even.
static inline u8 float_to_e4m3(float f) {
  const u32 bits = bits_as<u32>(f), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF;
  if (magnitude < 121u << 23) {  // below 2^-6: adding 2^14 moves multiples of 2^-9 to the bottom
    const float shifted = bits_as<float>(magnitude) + 16384.0f;
    return (u8)(sign | (bits_as<u32>(shifted) - (141u << 23)));
  }
  return (u8)(sign | (magnitude - (120u << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20);
}

static inline float e4m3_to_float(u8 code) {
  const u32 sign = (u32)(code & 0x80) << 24, magnitude = code & 0x7F;
  if (magnitude == 0x7F) return bits_as<float>(sign | 0x7FC00000);
  return bits_as<float>(bits_as<u32>(bits_as<float>(magnitude << 20) * 0x1p120f) | sign);
}

constexpr i32 SCALE_REBIAS = 127 - 40;

static inline bool finite_bits(u32 bits) { return (bits & 0x7F800000) != 0x7F800000; }

static inline u32 encode_unsigned(float x) {
  const i32 bits = bits_as<i32>(x);
  if (!finite_bits((u32)bits)) return INVALID;
  const i32 rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (SCALE_REBIAS << 10);
  if (rounded < 1 << 10) return 0;
  return rounded >= (i32)INVALID ? INVALID : (u32)rounded;
}

static inline float decode_unsigned(u32 code) { return code == INVALID ? NAN : bits_as<float>(code << 13) * 0x1p87f; }

static inline u32 encode_signed(float x) {
  const i32 bits = bits_as<i32>(x), magnitude = bits & 0x7FFFFFFF;
  if (!finite_bits((u32)bits)) return INVALID;
  const i32 rounded = ((magnitude + 0x1FFF + ((magnitude >> 14) & 1)) >> 14) - (SCALE_REBIAS << 9);
  if (rounded >= 0x7FFF) return INVALID;
  return rounded < 1 << 9 ? 0 : (u32)rounded | (bits < 0 ? 0x8000u : 0u);
}

static inline float decode_signed(u32 code) {
  if (code == INVALID) return NAN;
  const float magnitude = bits_as<float>((code & 0x7FFF) << 14) * 0x1p87f;
  return code >= 0x8000 ? -magnitude : magnitude;
}

static inline u32 load_u16(const u8* p) { return read<u16>(p); }
static inline u32 load_u32(const u8* p) { return read<u32>(p); }

// Loads row `token`, `head` of vectors as float32 [dim].
static inline void load_row(const Vectors& v, i64 token, i64 head, int dim, float* out) {
  const i64 first = token * v.token_stride + head * v.head_stride;
  if (v.dtype == F32) {
    memcpy(out, (const float*)v.data + first, sizeof(float) * dim);
  } else {
    const u16* x = (const u16*)v.data + first;
    for (int d = 0; d < dim; d++) out[d] = v.dtype == BF16 ? bf16_to_float(x[d]) : half_to_float(x[d]);
  }
}

static inline void store_row(const Vectors& v, i64 token, i64 head, int dim, const float* x) {
  const i64 first = token * v.token_stride + head * v.head_stride;
  if (v.dtype == F32) {
    memcpy((float*)v.data + first, x, sizeof(float) * dim);
  } else {
    u16* out = (u16*)v.data + first;
    for (int d = 0; d < dim; d++) out[d] = v.dtype == BF16 ? float_to_bf16(x[d]) : float_to_half(x[d]);
  }
}
