// The two matrix products of attention on a chunk of tokens: scores = q k, and out = out * rescale + weights v.
//
// With byte dot products (SLIMKV_DOT), queries and weights are integers of 23 bits in three signed bytes, so that their
// products with byte codes are exact. Otherwise bytes become floats in registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "unpack.h"

constexpr float DIGITS_LARGEST = 8257536.0f;  // 126 * 2^16: the leading byte of such an integer stays below 128

// 16 numbers x * up, each below 2^23, as three balanced bytes: x up = low + 256 middle + 65536 high.
static inline void digits_of(const float* x, float up, i8* low, i8* middle, i8* high) {
  VI digits[3][16 / W];
  for (int i = 0; i < 16 / W; i++) {
    digits[0][i] = to_integer(load_f(x + i * W) * up);
    digits[1][i] = (digits[0][i] + 128) >> 8;
    digits[2][i] = (digits[1][i] + 128) >> 8;
  }
  store_low_bytes(low, digits[0]);
  store_low_bytes(middle, digits[1]);
  store_low_bytes(high, digits[2]);
}

#if defined(SLIMKV_DOT)
// x [count] (a multiple of 16) as digits [3][stride], in units of the returned number, which is NaN for a row that is
// not finite. offset[j]: how much the 128 added to every code contributes to a product with digit j.
static float as_digits(const float* x, i64 count, i64 stride, i8* digits, i32* offset) {
  VF most = {}, sum = {};
  for (i64 i = 0; i < count; i += W) {
    const VF v = load_f(x + i);
    most = greater(v < 0.0f ? -v : v, most);
    sum += v;
  }
  const float largest = std::max(greatest_f(most), 1e-30f), whole = sum_f(sum);
  const bool finite = largest < INFINITY && whole == whole;
  const float up = finite ? DIGITS_LARGEST / largest : 0.0f;
  for (i64 i = 0; i < count; i += 16) digits_of(x + i, up, digits + i, digits + stride + i, digits + 2 * stride + i);
  for (int j = 0; j < 3; j++) {
    offset[j] = 0;
#if defined(SLIMKV_DOT_UNSIGNED)
    for (i64 i = 0; i < count; i++) offset[j] += 128 * digits[j * stride + i];
#endif
  }
  return finite ? largest / DIGITS_LARGEST : NAN;
}
#endif

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

// Calls block(rows, first row) with a constant `rows`: four rows at a time, then two, then one.
template <typename Block>
static inline void by_rows(int rows, Block block) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) block(std::integral_constant<int, 4>(), r);
  for (; r + 2 <= rows; r += 2) block(std::integral_constant<int, 2>(), r);
  if (r < rows) block(std::integral_constant<int, 1>(), r);
}

template <typename T>
static void scores_float(const float* q, int rows, i64 q_stride, const T* k, i64 stride, int tokens, int dim,
    float* scores) {
  by_rows(rows, [&](auto count, int r) {
    scores_block<count, T>(q + r * q_stride, q_stride, k, stride, tokens, dim, scores + r * CHUNK);
  });
}

// ---- weighted sums of values ----------------------------------------------------------------------------------------

// R rows of weights [CHUNK] by N vectors of V [token] -> out [R].
template <int R, int N>
static inline void weighted_vectors(const float* weights, const float* v, i64 stride, int tokens, const float* rescale,
    float* out, i64 out_stride) {
  VF sums[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) sums[r][i] = load_f(out + r * out_stride + i * W) * rescale[r];
  for (int t = 0; t < tokens; t++) {
    VF values[N];
    for (int i = 0; i < N; i++) values[i] = load_f(v + t * stride + i * W);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < N; i++) sums[r][i] = fma_f(splat(weights[r * CHUNK + t]), values[i], sums[r][i]);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store_f(out + r * out_stride + i * W, sums[r][i]);
}

static void weighted_float(const float* weights, int rows, const float* v, i64 stride, int tokens, int dim,
    const float* rescale, float* out, i64 out_stride) {
  by_rows(rows, [&](auto count, int r) {
    const auto block = [&](auto vectors, int d) {
      weighted_vectors<decltype(count)::value, decltype(vectors)::value>(weights + r * CHUNK, v + d, stride, tokens,
          rescale + r, out + r * out_stride + d, out_stride);
    };
    int d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) block(std::integral_constant<int, 2>(), d);
    if (d < dim) block(std::integral_constant<int, 1>(), d);
  });
}

#if !defined(SLIMKV_DOT)

// R rows of weights, in the order of V's bytes, by V's bytes -> out [R][dim].
template <int R>
static void weighted_bytes_block(const float* weights, const i8* v, int tokens, int dim, const float* rescale,
    float* out, i64 out_stride) {
  for (int d = 0; d < dim; d += W) {
    VF sums[R] = {};
    for (int t = 0; t < tokens; t += 4) {
      const VI four = load_i(v + value_offset(d, t));
      const VF numbers[4] = {to_float((four << 24) >> 24), to_float((four << 16) >> 24), to_float((four << 8) >> 24),
          to_float(four >> 24)};
      for (int r = 0; r < R; r++)
        for (int k = 0; k < 4; k++) sums[r] = fma_f(splat(weights[r * CHUNK + t + k]), numbers[k], sums[r]);
    }
    for (int r = 0; r < R; r++) {
      float* at = out + r * out_stride + d;
      store_f(at, sums[r] + load_f(at) * rescale[r]);
    }
  }
}

static void weighted_bytes(const float* weights, int rows, const i8* v, int tokens, int dim, const float* rescale,
    float* out, i64 out_stride) {
  by_rows(rows, [&](auto count, int r) {
    weighted_bytes_block<count>(weights + r * CHUNK, v, tokens, dim, rescale + r, out + r * out_stride, out_stride);
  });
}

#else

// ---- products of bytes ----------------------------------------------------------------------------------------------

// acc += the dot product of four code bytes and four signed bytes, in each lane.
static inline VI dot4(VI acc, VI codes, VI digits) {
#if defined(SLIMKV_NEON)
  return (VI)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, (int8x16_t)digits);
#else
  return (VI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)digits);
#endif
}

typedef i32 I4 __attribute__((vector_size(16)));
typedef float F4 __attribute__((vector_size(16)));

// Four accumulators -> their four sums.
static inline I4 sum_four(const VI* acc) {
#if defined(SLIMKV_NEON)
  const int32x4_t a = vpaddq_s32((int32x4_t)acc[0], (int32x4_t)acc[1]),
                  b = vpaddq_s32((int32x4_t)acc[2], (int32x4_t)acc[3]);
  return (I4)vpaddq_s32(a, b);
#else
  __m256i half[4];
  for (int i = 0; i < 4; i++)
    half[i] = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)acc[i]), _mm512_extracti64x4_epi64((__m512i)acc[i], 1));
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(half[0], half[1]), _mm256_hadd_epi32(half[2], half[3]));
  return (I4)_mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
#endif
}

// One query's digits [3][stride] by T tokens [stride] -> scores [T], in units of the digits.
// `offset`: see as_digits.
template <int T>
static inline void scores_dot_block(const i8* q, const i32* offset, const u8* keys, i64 stride, float* scores) {
  VI acc[3][T] = {};
  for (i64 d = 0; d < stride; d += 4 * W) {
    const VI one = load_i(q + d), two = load_i(q + stride + d), three = load_i(q + 2 * stride + d);
    for (int i = 0; i < T; i++) {
      const VI key = load_i(keys + i * stride + d);
      acc[0][i] = dot4(acc[0][i], key, one);
      acc[1][i] = dot4(acc[1][i], key, two);
      acc[2][i] = dot4(acc[2][i], key, three);
    }
  }
  for (int t = 0; t < T; t += 4) {
    F4 sums[3];
    for (int j = 0; j < 3; j++) sums[j] = __builtin_convertvector(sum_four(acc[j] + t) - offset[j], F4);
    const F4 found = (sums[2] * 65536.0f + sums[1] * 256.0f) + sums[0];
    memcpy(scores + t, &found, sizeof found);
  }
}

static void scores_dot(const i8* q, const i32* offset, const u8* k, i64 stride, int tokens, float* scores) {
  int t = 0;
  for (; t + 8 <= tokens; t += 8) scores_dot_block<8>(q, offset, k + t * stride, stride, scores + t);
  for (; t < tokens; t += 4) scores_dot_block<4>(q, offset, k + t * stride, stride, scores + t);
}

// A row's weights as digits, to be multiplied with V's bytes.
struct WeightDigits {
  const i8* digits;   // [3][CHUNK], in the order of V's bytes
  const i32* offset;  // [3]: see as_digits
  float unit, rescale;
  float* out;  // [dim]
};

// acc[j] += N vectors of V, four tokens each, times digits j of those tokens, the K-th four of 16 tokens.
template <int N, int K>
static inline void add_four_tokens(VI (&acc)[3][N], const VI (&values)[N], const i8* digits) {
  for (int j = 0; j < 3; j++) {
#if defined(SLIMKV_NEON)
    const int8x16_t all = vld1q_s8(digits + j * CHUNK);
    for (int i = 0; i < N; i++) acc[j][i] = (VI)vdotq_laneq_s32((int32x4_t)acc[j][i], (int8x16_t)values[i], all, K);
#else
    const VI four = splat_i(read<i32>(digits + j * CHUNK + 4 * K));
    for (int i = 0; i < N; i++) acc[j][i] = dot4(acc[j][i], values[i], four);
#endif
  }
}

template <int R, int N, int K>
static inline void add_rows(VI (&acc)[R][3][N], const WeightDigits* rows, const u8* v, int token) {
  VI values[N];
  for (int i = 0; i < N; i++) values[i] = load_i(v + value_offset(W * i, token + 4 * K));
  for (int r = 0; r < R; r++) add_four_tokens<N, K>(acc[r], values, rows[r].digits + token);
}

// R rows by N vectors of V's dimensions from `d` on -> out = out * rescale + unit * sums.
template <int R, int N>
static inline void weighted_dot_block(const WeightDigits* rows, const u8* v, int tokens, int d) {
  VI acc[R][3][N];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 3; j++)
      for (int i = 0; i < N; i++) acc[r][j][i] = splat_i(-rows[r].offset[j]);
  const u8* from = v + value_offset(d, 0);
  for (int t = 0; t < tokens; t += TILE) {
    add_rows<R, N, 0>(acc, rows, from, t);
    add_rows<R, N, 1>(acc, rows, from, t);
    add_rows<R, N, 2>(acc, rows, from, t);
    add_rows<R, N, 3>(acc, rows, from, t);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) {
      float* at = rows[r].out + d + i * W;
      VF sum = fma_f(to_float(acc[r][2][i]), splat(65536.0f), to_float(acc[r][0][i]));
      sum = fma_f(to_float(acc[r][1][i]), splat(256.0f), sum);
      store_f(at, fma_f(sum, splat(rows[r].unit), load_f(at) * rows[r].rescale));
    }
}

template <int R>
static void weighted_dot_rows(const WeightDigits* rows, const u8* v, int tokens, int dim) {
  int d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) weighted_dot_block<R, 4>(rows, v, tokens, d);
  for (; d < dim; d += W) weighted_dot_block<R, 1>(rows, v, tokens, d);
}

static void weighted_dot(const WeightDigits* rows, int count, const u8* v, int tokens, int dim) {
  int r = 0;
  for (; r + 2 <= count; r += 2) weighted_dot_rows<2>(rows + r, v, tokens, dim);
  if (r < count) weighted_dot_rows<1>(rows + r, v, tokens, dim);
}

#endif
