// SIMD vectors as wide as the registers of this build, in the compiler's vector types.
#pragma once

#include "numbers.h"

#if defined(SLIMKV_SIMDE)  // x86 intrinsics on another machine, for tests; SIMDe lacks a few
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>
#define SLIMKV_X86 1
#elif defined(__AVX2__)
#include <immintrin.h>
#define SLIMKV_X86 1
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define SLIMKV_NEON 1
#endif

#if defined(SLIMKV_X86) && (defined(__AVX512F__) || defined(SLIMKV_SIMDE_AVX512))
#define SLIMKV_AVX512 1
#define SLIMKV_WIDTH 16
#elif defined(SLIMKV_X86)
#define SLIMKV_WIDTH 8
#else
#define SLIMKV_WIDTH 4
#endif

// SLIMKV_DOT: an instruction adds the dot product of four signed bytes and four bytes to each 32-bit lane.
#if defined(SLIMKV_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define SLIMKV_DOT 1
#elif defined(SLIMKV_AVX512) && (defined(__AVX512VNNI__) || defined(SLIMKV_SIMDE_AVX512))
#define SLIMKV_DOT 1
#define SLIMKV_DOT_UNSIGNED 1  // its first operand is unsigned, so 128 is added to bytes
#endif

constexpr int W = SLIMKV_WIDTH;
typedef float VF __attribute__((vector_size(4 * W)));
typedef i32 VI __attribute__((vector_size(4 * W)));

static inline VF load_f(const float* p) { return read<VF>(p); }
static inline VI load_i(const void* p) { return read<VI>(p); }
static inline void store_f(float* p, VF v) { memcpy(p, &v, sizeof v); }
static inline void store_i(void* p, VI v) { memcpy(p, &v, sizeof v); }
static inline VF splat(float x) { return x - (VF){}; }
static inline VI splat_i(i32 x) { return x - (VI){}; }
static inline VF to_float(VI v) { return __builtin_convertvector(v, VF); }
// To the nearest integer; |v| < 2^23.
static inline VI to_integer(VF v) {
#if defined(SLIMKV_AVX512) && !defined(SLIMKV_SIMDE)
  return (VI)_mm512_cvtps_epi32((__m512)v);
#elif defined(SLIMKV_X86) && !defined(SLIMKV_AVX512)
  return (VI)_mm256_cvtps_epi32((__m256)v);
#elif defined(SLIMKV_NEON)
  return (VI)vcvtnq_s32_f32((float32x4_t)v);
#else
  VI out;
  for (int i = 0; i < W; i++) out[i] = (i32)__builtin_rintf(v[i]);
  return out;
#endif
}
// The elementwise maximum; b where a is NaN.
static inline VF greater(VF a, VF b) {
#if defined(SLIMKV_NEON)
  return (VF)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

// W signed bytes as floats.
static inline VF bytes_to_float(const i8* p) {
#if defined(SLIMKV_AVX512) && !defined(SLIMKV_SIMDE)
  return to_float((VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(SLIMKV_X86) && !defined(SLIMKV_AVX512)
  return to_float((VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(SLIMKV_NEON)
  return to_float((VI)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(read<i32>(p)))))));
#else
  VF out;
  for (int i = 0; i < W; i++) out[i] = p[i];
  return out;
#endif
}

// Stores the low bytes of 16 lanes.
static inline void store_low_bytes(i8* p, const VI* v) {
#if defined(SLIMKV_AVX512) && !defined(SLIMKV_SIMDE)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v[0]));
#elif defined(SLIMKV_NEON)
  const int16x8_t a = vuzp1q_s16((int16x8_t)v[0], (int16x8_t)v[1]), b = vuzp1q_s16((int16x8_t)v[2], (int16x8_t)v[3]);
  vst1q_s8(p, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)));
#else
  for (int i = 0; i < 16; i++) p[i] = (i8)v[i / W][i % W];
#endif
}

// a * b + c, fused if there is an instruction for it.
static inline VF fma_f(VF a, VF b, VF c) {
#if defined(SLIMKV_AVX512)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SLIMKV_X86)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(SLIMKV_NEON)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

static inline float sum_f(VF v) {
#if defined(SLIMKV_NEON)
  return vaddvq_f32((float32x4_t)v);
#else
  float out = 0;
  for (int i = 0; i < W; i++) out += v[i];
  return out;
#endif
}

static inline float greatest_f(VF v) {
#if defined(SLIMKV_NEON)
  return vmaxnmvq_f32((float32x4_t)v);
#else
  float out = v[0];
  for (int i = 1; i < W; i++) out = v[i] > out ? v[i] : out;
  return out;
#endif
}

// e^x for x <= 0, within 2 units in the last place; 1e-38 at -87.3 and below; NaN stays NaN.
static inline VF exp_f(VF x) {
  const VF low = splat(-87.3f);
  const VF inside = x < low ? low : x;
  const VF magic = splat(12582912.0f);
  const VF n = fma_f(inside, splat(1.44269504f), magic) - magic;
  VF r = fma_f(n, splat(-0.693359375f), inside);
  r = fma_f(n, splat(2.12194440e-4f), r);
  VF p = splat(1.9875691500e-4f);
  p = fma_f(p, r, splat(1.3981999507e-3f));
  p = fma_f(p, r, splat(8.3334519073e-3f));
  p = fma_f(p, r, splat(4.1665795894e-2f));
  p = fma_f(p, r, splat(1.6666665459e-1f));
  p = fma_f(p, r, splat(5.0000001201e-1f));
  p = fma_f(p, r * r, r) + 1.0f;
  const VI scale = (__builtin_convertvector(n, VI) + 127) << 23;
  return p * (VF)scale;
}

// tanh: a polynomial near zero, where 1 - e^(-2|x|) would cancel.
static inline VF tanh_f(VF x) {
  const VF size = x < 0.0f ? -x : x;
  const VF e = exp_f(size * -2.0f);
  VF far = (1.0f - e) / (1.0f + e);
  far = x < 0.0f ? -far : far;
  const VF s = x * x;
  VF p = splat(62.0f / 2835);
  p = fma_f(p, s, splat(-17.0f / 315));
  p = fma_f(p, s, splat(2.0f / 15));
  p = fma_f(p, s, splat(-1.0f / 3));
  const VF near = fma_f(p * s, x, x);
  return size < 0.3f ? near : far;
}
