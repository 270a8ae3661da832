// The conversion of vectors to integers, and their norms.
//
// Short integers (16-bit inputs, codes of up to 4 bits) remain 16-bit floats. Floats near zero are multiples of the
// smallest denormal number, so multiplying by a power of two rounds to integers in that unit. Up to twice the smallest
// normal number, the bits of such a float are the integer itself and its sign.
//
// A 22-bit integer is split into three digits, low + 2^8 middle + 2^16 top, where low and middle are unsigned bytes. A
// float that is 1.5 * 2^23 plus an integer has the integer in its low bits, so the digits are its bytes.
#pragma once
#include "store/rows.cuh"

template <class F,
    bool SHORT =
        F::SHORT> struct Digits {  // [chunk][token g or g + 8][first or last four of a lane's eight dimensions]
  typedef i32 Sum;
  u32 low[F::CHUNKS][2][2], middle[F::CHUNKS][2][2], top[F::CHUNKS][2][2];
};
template <class F> struct Digits<F, true> {  // [chunk][token g or g + 8][pair of a lane's eight dimensions]
  typedef float Sum;  // in units of 2^-SHORT_SHIFT
  u32 pairs[F::CHUNKS][2][4];
};
// The smallest denormal number is 2^-24 (float16) or 2^-133 (bfloat16), and the matrix has entries +-2^-24 or +-2^64,
// so sums stay far from float32's limits.
template <class F> constexpr int SHORT_SHIFT = F::DTYPE == FLOAT16 ? 48 : 69;
DEVICE float power_of_two(int exponent) { return as_float((u32)(exponent + 127) << 23); }
template <class F> DEVICE float integer_of(float sum) { return sum * power_of_two(SHORT_SHIFT<F>); }
template <class F> DEVICE float integer_of(i32 sum) { return i32_to_f32_rn(sum); }

struct TokenScalars {  // of the lane's token (lane % 16), in fixed-point units
  float norm;
  float factor;  // converts an integer to a coordinate in the codebook's units
  float down;
  bool zero, bad;
};

DEVICE u32 larger_of(u32 a, u32 b) { return a > b ? a : b; }

// The larger magnitude of values in the input's dtype, with an arbitrary sign; NaN if either is NaN.
template <class F> DEVICE u32 larger_word(u32 a, u32 b) {
  return F::DTYPE == FLOAT32 ? larger_of(a & 0x7FFFFFFFu, b & 0x7FFFFFFFu)
      : F::DTYPE == FLOAT16  ? max_abs_f16x2(a, b)
                             : max_abs_bf16x2(a, b);
}

// The largest magnitude among a lane's words of a row.
template <class F> DEVICE u32 largest_of_lane(const u32 raw[F::CHUNKS][2][F::RAW], int half) {
  constexpr int CHAINS = 4;
  u32 most[CHAINS];
  UNROLL_FOR (int i = 0; i < F::RAW * F::CHUNKS; i++) {
    u32 w = raw[i / F::RAW][half][i % F::RAW], &m = most[i % CHAINS];
    m = i < CHAINS ? w : larger_word<F>(m, w);
  }
  return larger_word<F>(larger_word<F>(most[0], most[1]), larger_word<F>(most[2], most[3]));
}

// The float32 exponents of the largest magnitudes of tokens g and g + 8, in bytes 0 and 2.
template <class F> DEVICE u32 largest_exponents(const u32 raw[F::CHUNKS][2][F::RAW]) {
  u32 first = largest_of_lane<F>(raw, 0), second = largest_of_lane<F>(raw, 1);
  if constexpr (F::NARROW) {  // both in a word
    u32 both = larger_word<F>(prmt(first, second, 0x5410), prmt(first, second, 0x7632));
    both = larger_word<F>(both, shfl_xor(both, 1));
    both = larger_word<F>(both, shfl_xor(both, 2));
    if constexpr (F::DTYPE == BFLOAT16) return both >> 7 & 0x00FF00FFu;
    return (as_bits(f16_to_f32(both & 0x7FFF)) >> 23) | (as_bits(f16_to_f32(both >> 16 & 0x7FFF)) >> 23) << 16;
  } else {
    first = larger_word<F>(first, shfl_xor(first, 1)), second = larger_word<F>(second, shfl_xor(second, 1));
    first = larger_word<F>(first, shfl_xor(first, 2)), second = larger_word<F>(second, shfl_xor(second, 2));
    return first >> 23 | second >> 23 << 16;
  }
}

template <class F> DEVICE void take_digits(const u32 raw[F::RAW], int first, float up, u32& low, u32& middle,
    u32& top) {
  u32 m[4];
  UNROLL_FOR (int i = 0; i < 4; i++) m[i] = as_bits(fma_rn(element<F::DTYPE>(raw, first + i), up, 12582912.0f));
  u32 a = prmt(m[0], m[1], 0x5140), b = prmt(m[2], m[3], 0x5140);
  low = prmt(a, b, 0x5410);
  middle = prmt(a, b, 0x7632);
  // The third byte is 64 + top, and |top| is at most 32. For 16-bit floats it is below 32, so 4 top is a signed byte;
  // for float32, 2 top is.
  u32 third = prmt(prmt(m[0], m[1], 0x0062), prmt(m[2], m[3], 0x0062), 0x5410);
  top = F::NARROW ? third << 2 & 0xFCFCFCFCu : third << 1 ^ 0x80808080u;
}

template <class F> DEVICE u32 times(u32 pair, u32 by) {
  return F::DTYPE == FLOAT16 ? mul_f16x2(pair, by) : mul_bf16x2(pair, by);
}

// The tokens' sums of squares, with integers rounded to multiples of 256: four products of bytes at a time.
template <class F> DEVICE float squared_norms(const Digits<F, true>& d, int lane) {
  constexpr u32 BY_STEP = F::DTYPE == FLOAT16 ? 0x1C001C00 : 0x3B803B80;  // 1 / 256
  u32 sums[2] = {}, largest[2] = {};
  UNROLL_FOR (int i = 0; i < 4 * F::CHUNKS; i++) {
    const int h = i % 2;
    const u32* four = &d.pairs[i / 4][h][i & 2];
    u32 first = times<F>(four[0], BY_STEP), second = times<F>(four[1], BY_STEP), low = prmt(first, second, 0x6420);
    sums[h] = dp4a_u8(low, low, sums[h]);
    if constexpr (F::DTYPE == FLOAT16) {  // an 11-bit number may be rounded up to 256 steps
      u32 high = prmt(first, second, 0x7531) & 0x7F7F7F7Fu;
      largest[h] = dp4a_u8(high, high, largest[h]);
    }
  }
  UNROLL_FOR (int h = 0; h < 2; h++) sums[h] += 65536 * largest[h];
  return mul_rn(i32_to_f32_rn((i32)sum_of_rows(sums, lane)), 65536.0f);
}

template <class F> constexpr int TOP_UNIT = F::NARROW ? 1 << 14 : 1 << 15;  // the value of the top digit's unit

struct SquareSums {  // sums of squares of integers, by pairs of digits
  u32 lows = 0, low_middle = 0, middles = 0;
  i32 low_top = 0, middle_top = 0, tops = 0;

  DEVICE_MEMBER void add(u32 low, u32 middle, u32 top) {  // four integers
    lows = dp4a_u8(low, low, lows);
    low_middle = dp4a_u8(low, middle, low_middle);
    middles = dp4a_u8(middle, middle, middles);
    low_top = dp4a_u8_s8(low, top, low_top);
    middle_top = dp4a_u8_s8(middle, top, middle_top);
    tops = dp4a_s8(top, top, tops);
  }
  template <class F> DEVICE_MEMBER i64 total() const {
    constexpr i64 TOP = TOP_UNIT<F>;
    return (i64)lows + (i64)low_middle * 512 + (i64)middles * 65536 + (i64)low_top * (2 * TOP) +
        (i64)middle_top * (512 * TOP) + (i64)tops * (TOP * TOP);
  }
};

template <class F> DEVICE float squared_norms(const Digits<F, false>& d, int lane) {
  i64 sums[2];
  UNROLL_FOR (int h = 0; h < 2; h++) {
    SquareSums squares;
    UNROLL_FOR (int i = 0; i < 2 * F::CHUNKS; i++)
      squares.add(d.low[i / 2][h][i % 2], d.middle[i / 2][h][i % 2], d.top[i / 2][h][i % 2]);
    sums[h] = squares.total<F>();
  }
  return i64_to_f32_rn(sum_of_rows(sums, lane));
}

// The largest float32 exponent that one power of two turns into integers, and the smallest whose scales overflow.
template <class F> constexpr u32 LARGEST_EXPONENT = F::DTYPE == FLOAT16 ? 142 : 135;
constexpr u32 TOO_LARGE = 240;

// The power of two that turns a vector of this exponent into integers, in both halves of a word.
template <class F> DEVICE u32 power_for(u32 exponent) {
  u32 power = F::DTYPE != FLOAT16 ? (136 - exponent) << 7
      : exponent < 133            ? (133 - exponent) << 10
                                  : 1u << (142 - exponent);
  return power | power << 16;
}

// Converts rows to short integers. exponents: of tokens g and g + 8.
template <class F> DEVICE void take_integers(const u32 raw[F::CHUNKS][2][F::RAW], const u32 exponents[2],
    Digits<F, true>& d) {
  u32 by[2];
  UNROLL_FOR (int h = 0; h < 2; h++) by[h] = exponents[h] < LEAST_EXPONENT ? 0 : power_for<F>(exponents[h]);
  if (warp_any(larger_of(exponents[0], exponents[1]) > LARGEST_EXPONENT<F>)) {
    sync_warp();  // keeps the compiler from selecting word by word instead of branching
    // A large vector is first divided by 2^104, which changes only bits far below a unit. An invalid vector becomes
    // zero.
    UNROLL_FOR (int h = 0; h < 2; h++) {
      bool large = exponents[h] > LARGEST_EXPONENT<F>;
      u32 before = large ? 0x0B800B80u : 0x3F803F80u;  // bfloat16
      u32 then = large ? power_for<F>(exponents[h] - 104) : by[h], keep = exponents[h] < TOO_LARGE ? 0xFFFFFFFFu : 0;
      UNROLL_FOR (int i = 0; i < 4 * F::CHUNKS; i++) {
        u32 pair = raw[i / 4][h][i % 4];
        d.pairs[i / 4][h][i % 4] = times<F>(F::DTYPE == FLOAT16 ? pair : times<F>(pair, before), then) & keep;
      }
    }
  } else {
    UNROLL_FOR (int i = 0; i < 8 * F::CHUNKS; i++)
      d.pairs[i / 8][i % 2][i / 2 % 4] = times<F>(raw[i / 8][i % 2][i / 2 % 4], by[i % 2]);
  }
}

// The power of two that brings the largest magnitude into [2^20, 2^21).
DEVICE float digits_up(u32 exponent) {
  return exponent < LEAST_EXPONENT ? 0.0f : as_float((274 - (exponent < 254 ? exponent : 254)) << 23);
}

template <class F> DEVICE void take_integers(const u32 raw[F::CHUNKS][2][F::RAW], const u32 exponents[2],
    Digits<F, false>& d) {
  UNROLL_FOR (int h = 0; h < 2; h++) {
    const float up = digits_up(exponents[h]);
    UNROLL_FOR (int i = 0; i < 2 * F::CHUNKS; i++)
      take_digits<F>(raw[i / 2][h], 4 * (i % 2), up, d.low[i / 2][h][i % 2], d.middle[i / 2][h][i % 2],
          d.top[i / 2][h][i % 2]);
  }
}

// Picks the exponent of the lane's own token from those of tokens g and g + 8.
DEVICE u32 exponent_of_token(u32 both, int lane) {
  u32 there = shfl(both, 4 * (lane & 7));
  return lane & 8 ? there >> 16 : there & 0xFF;
}

// Computes the digits of the tile's tokens; returns the exponent of the lane's own token.
template <class F> DEVICE u32 fixed_point(const u32 raw[F::CHUNKS][2][F::RAW], int lane, Digits<F>& d) {
  u32 both = largest_exponents<F>(raw);
  const u32 exponents[2] = {both & 0xFF, both >> 16};
  take_integers<F>(raw, exponents, d);
  return exponent_of_token(both, lane);
}

// The scalars of a token. squared: the sum of its squares.
template <class F> DEVICE TokenScalars scalars_of(float squared, u32 exponent, float unit) {
  TokenScalars s;
  s.bad = exponent >= (F::SHORT ? TOO_LARGE : 255);
  s.zero = exponent < LEAST_EXPONENT;
  s.down = as_float(((s.zero ? LEAST_EXPONENT : s.bad ? 254 : exponent) - (F::SHORT ? 15 : 20)) << 23);
  s.norm = sqrt_rn_normal(max_f32(squared, 1.0f));  // at least 1, so that a zero vector needs no branch
  s.factor = div_rn_normal(unit, s.norm);
  if (!F::SHORT && s.bad) s.factor = 0.0f;  // its digits are arbitrary
  return s;
}
template <class F> DEVICE TokenScalars scalars_of(const Digits<F>& d, u32 exponent, float unit, int lane) {
  return scalars_of<F>(squared_norms<F>(d, lane), exponent, unit);
}
