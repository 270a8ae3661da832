// The two matrix products of attention on a chunk of tokens: scores = q k, and out = out * rescale + weights v.
//
// Where the machine multiplies bytes (SLIMKV_DOT), queries and weights are held as integers of 23 bits in three signed
// bytes, so that their products with byte codes are exact; elsewhere bytes become floats in registers.
#pragma once

#include "unpack.h"

constexpr int CHUNK = 128;                   // tokens that are unpacked together
constexpr float DIGITS_LARGEST = 8257536.0f;  // 126 * 2^16: the leading byte of such an integer stays below 128

// x * up as three balanced bytes: x up = b[0] + 256 b[1] + 65536 b[2].
static inline void digits_of(float x, float up, i8* low, i8* middle, i8* high) {
  const i32 whole = (i32)__builtin_rintf(x * up);
  const i32 d0 = (i32)(i8)whole, rest = (whole - d0) >> 8, d1 = (i32)(i8)rest;
  *low = (i8)d0;
  *middle = (i8)d1;
  *high = (i8)((rest - d1) >> 8);
}

// ---- scores ---------------------------------------------------------------------------------------------------------

static inline VF as_float(const float* p) { return load_f(p); }
static inline VF as_float(const i8* p) { return bytes_to_float(p); }

// R queries [dim] by tokens (a multiple of 4) [stride] -> scores [R][CHUNK].
template <int R, typename T>
static void scores_block(const float* q, i64 q_stride, const T* k, i64 stride, int tokens, int dim, float* scores) {
  for (int t = 0; t < tokens; t += 4) {
    VF sums[R][4] = {};
    for (int d = 0; d < dim; d += W) {
      VF keys[4];
      for (int i = 0; i < 4; i++) keys[i] = as_float(k + (t + i) * stride + d);
      for (int r = 0; r < R; r++) {
        const VF query = load_f(q + r * q_stride + d);
        for (int i = 0; i < 4; i++) sums[r][i] = fma_f(query, keys[i], sums[r][i]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 4; i++) scores[r * CHUNK + t + i] = sum_f(sums[r][i]);
  }
}

template <typename T>
static void scores_float(const float* q, int rows, i64 q_stride, const T* k, i64 stride, int tokens, int dim, float* scores) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) scores_block<4, T>(q + r * q_stride, q_stride, k, stride, tokens, dim, scores + r * CHUNK);
  for (; r + 2 <= rows; r += 2) scores_block<2, T>(q + r * q_stride, q_stride, k, stride, tokens, dim, scores + r * CHUNK);
  if (r < rows) scores_block<1, T>(q + r * q_stride, q_stride, k, stride, tokens, dim, scores + r * CHUNK);
}

// ---- weighted sums of values ----------------------------------------------------------------------------------------

// R rows of weights [CHUNK] by V [token][dim] -> out [R][dim].
template <int R>
static void weighted_block(const float* weights, const float* v, i64 stride, int tokens, int dim, const float* rescale, float* out, i64 out_stride) {
  for (int d = 0; d < dim; d += 2 * W) {
    const int vectors = d + W < dim ? 2 : 1;
    VF sums[R][2];
    for (int r = 0; r < R; r++)
      for (int i = 0; i < vectors; i++) sums[r][i] = load_f(out + r * out_stride + d + i * W) * rescale[r];
    if (vectors == 2) {
      for (int t = 0; t < tokens; t++) {
        const VF a = load_f(v + t * stride + d), b = load_f(v + t * stride + d + W);
        for (int r = 0; r < R; r++) {
          const VF weight = splat(weights[r * CHUNK + t]);
          sums[r][0] = fma_f(weight, a, sums[r][0]);
          sums[r][1] = fma_f(weight, b, sums[r][1]);
        }
      }
    } else {
      for (int t = 0; t < tokens; t++) {
        const VF a = load_f(v + t * stride + d);
        for (int r = 0; r < R; r++) sums[r][0] = fma_f(splat(weights[r * CHUNK + t]), a, sums[r][0]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < vectors; i++) store_f(out + r * out_stride + d + i * W, sums[r][i]);
  }
}

static void weighted_float(const float* weights, int rows, const float* v, i64 stride, int tokens, int dim, const float* rescale, float* out, i64 out_stride) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    weighted_block<4>(weights + r * CHUNK, v, stride, tokens, dim, rescale + r, out + r * out_stride, out_stride);
  for (; r < rows; r++)
    weighted_block<1>(weights + r * CHUNK, v, stride, tokens, dim, rescale + r, out + r * out_stride, out_stride);
}

#if !defined(SLIMKV_DOT)

// R rows of weights, in the order of V's bytes, by V [token / 4][dim][4] -> out [R][dim].
template <int R>
static void weighted_bytes_block(const float* weights, const i8* v, int tokens, int dim, float unit, const float* rescale, float* out, i64 out_stride) {
  for (int d = 0; d < dim; d += W) {
    VF sums[R] = {};
    for (int t = 0; t < tokens; t += 4) {
      const VI four = load_i(v + (i64)t * dim + 4 * d);
      const VF numbers[4] = {to_float((four << 24) >> 24), to_float((four << 16) >> 24), to_float((four << 8) >> 24), to_float(four >> 24)};
      for (int r = 0; r < R; r++)
        for (int k = 0; k < 4; k++) sums[r] = fma_f(splat(weights[r * CHUNK + t + k]), numbers[k], sums[r]);
    }
    for (int r = 0; r < R; r++) {
      float* at = out + r * out_stride + d;
      store_f(at, fma_f(sums[r], splat(unit), load_f(at) * rescale[r]));
    }
  }
}

static void weighted_bytes(const float* weights, int rows, const i8* v, int tokens, int dim, float unit, const float* rescale, float* out, i64 out_stride) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    weighted_bytes_block<4>(weights + r * CHUNK, v, tokens, dim, unit, rescale + r, out + r * out_stride, out_stride);
  for (; r + 2 <= rows; r += 2)
    weighted_bytes_block<2>(weights + r * CHUNK, v, tokens, dim, unit, rescale + r, out + r * out_stride, out_stride);
  if (r < rows) weighted_bytes_block<1>(weights + r * CHUNK, v, tokens, dim, unit, rescale + r, out + r * out_stride, out_stride);
}

#else

// ---- products of bytes ----------------------------------------------------------------------------------------------

// acc += four bytes of codes by four signed bytes, in each lane.
static inline VI dot4(VI acc, VI codes, VI digits) {
#if defined(SLIMKV_NEON)
  return (VI)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, (int8x16_t)digits);
#else
  return (VI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)digits);
#endif
}

// Four accumulators -> their four sums.
static inline void sum_four(const VI* acc, i32* out) {
#if defined(SLIMKV_NEON)
  const int32x4_t a = vpaddq_s32((int32x4_t)acc[0], (int32x4_t)acc[1]), b = vpaddq_s32((int32x4_t)acc[2], (int32x4_t)acc[3]);
  vst1q_s32(out, vpaddq_s32(a, b));
#else
  __m256i half[4];
  for (int i = 0; i < 4; i++)
    half[i] = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)acc[i]), _mm512_extracti64x4_epi64((__m512i)acc[i], 1));
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(half[0], half[1]), _mm256_hadd_epi32(half[2], half[3]));
  _mm_storeu_si128((__m128i*)out, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#endif
}

// One query's digits [3][stride] by tokens (a multiple of 4) [stride] -> scores [tokens], in units of the digits.
// `offset`: what 128 in every code adds, by digit.
static void scores_dot(const i8* q, const i32* offset, const u8* k, i64 stride, int tokens, float* scores) {
  for (int t = 0; t < tokens; t += 4) {
    VI acc[3][4] = {};
    const u8* keys = k + t * stride;
    for (i64 d = 0; d < stride; d += 4 * W) {
      const VI a = load_i(keys + d), b = load_i(keys + stride + d), c = load_i(keys + 2 * stride + d);
      const VI e = load_i(keys + 3 * stride + d);
      for (int j = 0; j < 3; j++) {
        const VI digits = load_i(q + j * stride + d);
        acc[j][0] = dot4(acc[j][0], a, digits);
        acc[j][1] = dot4(acc[j][1], b, digits);
        acc[j][2] = dot4(acc[j][2], c, digits);
        acc[j][3] = dot4(acc[j][3], e, digits);
      }
    }
    i32 sums[3][4];
    for (int j = 0; j < 3; j++) sum_four(acc[j], sums[j]);
    for (int i = 0; i < 4; i++)
      scores[t + i] = ((float)(sums[2][i] - offset[2]) * 65536.0f + (float)(sums[1][i] - offset[1]) * 256.0f) + (float)(sums[0][i] - offset[0]);
  }
}

static inline VI splat_digits(const i8* p) {
  i32 four;
  memcpy(&four, p, sizeof four);
  return splat_i(four);
}

// One row's digits [3][CHUNK], in the order of V's bytes, by V [token / 4][dim][4] -> out = out * rescale + unit * sums.
template <int N>
static inline void weighted_dot_block(const i8* w, const i32* offset, const u8* v, int tokens, i64 dim, float unit, float rescale, float* out) {
  VI acc[3][N];
  for (int j = 0; j < 3; j++)
    for (int i = 0; i < N; i++) acc[j][i] = splat_i(-offset[j]);
  for (int t = 0; t < tokens; t += 4) {
    VI values[N];
    for (int i = 0; i < N; i++) values[i] = load_i(v + t * dim + 4 * W * i);
    for (int j = 0; j < 3; j++) {
      const VI digits = splat_digits(w + j * CHUNK + t);
      for (int i = 0; i < N; i++) acc[j][i] = dot4(acc[j][i], values[i], digits);
    }
  }
  for (int i = 0; i < N; i++) {
    VF sum = fma_f(to_float(acc[2][i]), splat(65536.0f), to_float(acc[0][i]));
    sum = fma_f(to_float(acc[1][i]), splat(256.0f), sum);
    store_f(out + i * W, fma_f(sum, splat(unit), load_f(out + i * W) * rescale));
  }
}

static void weighted_dot(const i8* w, const i32* offset, const u8* v, int tokens, int dim, float unit, float rescale, float* out) {
  int d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) weighted_dot_block<4>(w, offset, v + 4 * d, tokens, dim, unit, rescale, out + d);
  for (; d < dim; d += W) weighted_dot_block<1>(w, offset, v + 4 * d, tokens, dim, unit, rescale, out + d);
}

#endif
