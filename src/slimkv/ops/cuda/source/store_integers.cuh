// Vectors to integers, and their norm.
//
// Short integers (of 16-bit floats, for codes of up to 4 bits) stay 16-bit floats: those nearest to zero, down to the
// smallest denormal number, are all multiples of it, so a product with a power of two rounds to integers of that unit. Up to
// twice the smallest normal number the bits of such a float are the integer itself, beside its sign.
//
// A 22-bit integer is cut into three digits, fixed = low + 2^8 middle + 2^16 top, of which low and middle are unsigned
// bytes. A float that is 1.5 * 2^23 plus an integer has the integer in its low bits: the digits are its bytes.
#pragma once
#include "store_rows.cuh"

template <class F, bool SHORT = F::SHORT> struct Digits {  // [chunk][token g or g + 8][first or last four of a lane's eight dimensions]
  typedef i32 Sum;
  u32 low[F::CHUNKS][2][2], middle[F::CHUNKS][2][2], top[F::CHUNKS][2][2];
};
template <class F> struct Digits<F, true> {  // [chunk][token g or g + 8][pair of a lane's eight dimensions]
  typedef float Sum;                         // in units of 2^-SHORT_SHIFT
  u32 pairs[F::CHUNKS][2][4];
};
// The smallest denormal number is 2^-24 or 2^-133, and the matrix has +-2^-24 or +-2^64: sums are far from float32's ends.
template <class F> constexpr int SHORT_SHIFT = F::DTYPE == FLOAT16 ? 48 : 69;
DEVICE float power_of_two(int exponent) { return as_float((u32)(exponent + 127) << 23); }
template <class F> DEVICE float integer_of(float sum) { return sum * power_of_two(SHORT_SHIFT<F>); }
template <class F> DEVICE float integer_of(i32 sum) { return int_to_float_rn(sum); }

struct TokenScalars {  // of the lane's token (lane % 16), in fixed-point units
  float squared, norm;
  float factor;  // what makes an integer a coordinate in the codebook's units
  float down;
  bool zero, bad;
};

DEVICE u32 larger_of(u32 a, u32 b) { return a > b ? a : b; }

// Float32 bits of the largest magnitude among the chunks' values; those of a NaN if there is one.
template <class F> DEVICE u32 largest_of_lane(const u32 raw[F::CHUNKS][2][F::RAW], int half) {
  u32 most = F::NARROW ? raw[0][half][0] : 0;
#pragma unroll
  for (int c = 0; c < F::CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < F::RAW; i++) {
      u32 w = raw[c][half][i];
      if constexpr (F::DTYPE == FLOAT32) most = larger_of(most, w & 0x7FFFFFFFu);
      else if constexpr (F::DTYPE == BFLOAT16) most = larger_bfloats(most, w);
      else most = larger_halves(most, w);
    }
  if constexpr (F::DTYPE == FLOAT32) return most;
  most &= 0x7FFF7FFFu;
  return larger_of(as_bits(element<F::DTYPE>(&most, 0)), as_bits(element<F::DTYPE>(&most, 1)));
}

template <class F> DEVICE void take_digits(const u32 raw[F::RAW], int first, float up, u32& low, u32& middle, u32& top) {
  u32 m[4];
#pragma unroll
  for (int i = 0; i < 4; i++) m[i] = as_bits(fma_rn(element<F::DTYPE>(raw, first + i), up, 12582912.0f));
  u32 a = prmt(m[0], m[1], 0x5140), b = prmt(m[2], m[3], 0x5140);
  low = prmt(a, b, 0x5410);
  middle = prmt(a, b, 0x7632);
  // The third byte is 64 + top, and |top| is at most 32. Of 16-bit floats it is below 32, and 4 top a signed byte; of float32
  // 2 top is one.
  u32 third = prmt(prmt(m[0], m[1], 0x0062), prmt(m[2], m[3], 0x0062), 0x5410);
  top = F::NARROW ? third << 2 & 0xFCFCFCFCu : third << 1 ^ 0x80808080u;
}

template <class F> DEVICE u32 times(u32 pair, u32 by) { return F::DTYPE == FLOAT16 ? times_halves(pair, by) : times_bfloats(pair, by); }

// The sum of squares of the tile's tokens, in steps of 256: four products of bytes at a time.
template <class F> DEVICE float squared_norms(const Digits<F, true>& d, int lane) {
  constexpr u32 BY_STEP = F::DTYPE == FLOAT16 ? 0x1C001C00 : 0x3B803B80;  // 1 / 256
  u32 sums[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 lows = 0, largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * F::CHUNKS; i++) {
      u32 first = times<F>(d.pairs[i / 2][h][2 * (i % 2)], BY_STEP), second = times<F>(d.pairs[i / 2][h][2 * (i % 2) + 1], BY_STEP);
      u32 low = prmt(first, second, 0x6420);
      lows = dot_u8(low, low, lows);
      if constexpr (F::DTYPE == FLOAT16) {  // of 11 bits one may be rounded up to 256 steps
        u32 high = prmt(first, second, 0x7531) & 0x7F7F7F7Fu;
        largest = dot_u8(high, high, largest);
      }
    }
    sums[h] = lows + 65536 * largest;
  }
  return mul_rn(int_to_float_rn((i32)sum_of_rows(sums, lane)), 65536.0f);
}

template <class F> DEVICE float squared_norms(const Digits<F, false>& d, int lane) {
  i64 sums[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 lows = 0, low_middle = 0, middles = 0;
    i32 low_top = 0, middle_top = 0, tops = 0;
#pragma unroll
    for (int i = 0; i < 2 * F::CHUNKS; i++) {
      u32 low = d.low[i / 2][h][i % 2], middle = d.middle[i / 2][h][i % 2], top = d.top[i / 2][h][i % 2];
      lows = dot_u8(low, low, lows);
      low_middle = dot_u8(low, middle, low_middle);
      middles = dot_u8(middle, middle, middles);
      low_top = dot_u8_s8(low, top, low_top);
      middle_top = dot_u8_s8(middle, top, middle_top);
      tops = dot_s8(top, top, tops);
    }
    constexpr i64 TOP = F::NARROW ? 1 << 14 : 1 << 15;  // what one unit of the top digit is worth
    sums[h] = (i64)lows + (i64)low_middle * 512 + (i64)middles * 65536 + (i64)low_top * (2 * TOP) +
              (i64)middle_top * (512 * TOP) + (i64)tops * (TOP * TOP);
  }
  return long_to_float_rn(sum_of_rows(sums, lane));
}

// Exponents (of float32) up to which there is a power of two that makes integers of a vector, and from which on a page can
// hold no scale.
template <class F> constexpr u32 LARGEST_EXPONENT = F::DTYPE == FLOAT16 ? 142 : 135;
constexpr u32 TOO_LARGE = 240;

// That power, as a pair.
template <class F> DEVICE u32 power_for(u32 exponent) {
  u32 power = F::DTYPE != FLOAT16 ? (136 - exponent) << 7 : exponent < 133 ? (133 - exponent) << 10 : 1u << (142 - exponent);
  return power | power << 16;
}

// Token g or g + 8 of the rows as short integers; vectors below 2^-60 are zero.
template <class F> DEVICE void short_integers(const u32 raw[F::CHUNKS][2][F::RAW], int h, u32 exponent, u32 pairs[F::CHUNKS][2][4]) {
  u32 by = exponent < 67 ? 0 : power_for<F>(exponent);
  if (any_lane(exponent > LARGEST_EXPONENT<F>)) {
    sync_warp();  // keeps the compiler from selecting word by word instead of branching
    // A large vector is first made 2^104 times smaller, which changes only what is far below a unit. One that is no vector
    // at all becomes zero.
    bool large = exponent > LARGEST_EXPONENT<F>;
    u32 before = large ? 0x0B800B80u : 0x3F803F80u;  // bfloat16
    if (large) by = power_for<F>(exponent - 104);
    u32 keep = exponent < TOO_LARGE ? 0xFFFFFFFFu : 0;
#pragma unroll
    for (int i = 0; i < 4 * F::CHUNKS; i++)
      pairs[i / 4][h][i % 4] = times<F>(F::DTYPE == FLOAT16 ? raw[i / 4][h][i % 4] : times<F>(raw[i / 4][h][i % 4], before), by) & keep;
  } else {
#pragma unroll
    for (int i = 0; i < 4 * F::CHUNKS; i++) pairs[i / 4][h][i % 4] = times<F>(raw[i / 4][h][i % 4], by);
  }
}

// Digits of the tile's tokens, and what there is one of per token.
template <class F> DEVICE TokenScalars fixed_point(const u32 raw[F::CHUNKS][2][F::RAW], float unit, int lane, Digits<F>& d) {
  u32 exponents[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 most = largest_of_lane<F>(raw, h);
    most = larger_of(most, shuffle_xor(most, 1));
    most = larger_of(most, shuffle_xor(most, 2));
    u32 exponent = most >> 23;
    exponents[h] = exponent;
    if constexpr (F::SHORT) short_integers<F>(raw, h, exponent, d.pairs);
    else {
      // A power of two that brings the largest into [2^20, 2^21); vectors below 2^-60 are zero.
      float up = exponent < 67 ? 0.0f : as_float((274 - (exponent < 254 ? exponent : 254)) << 23);
#pragma unroll
      for (int c = 0; c < F::CHUNKS; c++)
#pragma unroll
        for (int r = 0; r < 2; r++) take_digits<F>(raw[c][h], 4 * r, up, d.low[c][h][r], d.middle[c][h][r], d.top[c][h][r]);
    }
  }
  int token = lane & 15, from = 4 * (token & 7);
  u32 first = shuffle(exponents[0], from), second = shuffle(exponents[1], from);
  u32 exponent = token < 8 ? first : second;
  TokenScalars s;
  s.bad = exponent >= (F::SHORT ? TOO_LARGE : 255);
  s.zero = exponent < 67;
  s.down = as_float(((s.zero ? 67 : s.bad ? 254 : exponent) - (F::SHORT ? 15 : 20)) << 23);
  s.squared = squared_norms<F>(d, lane);
  s.norm = sqrt_rn(s.squared);
  s.factor = s.zero || s.bad ? 0.0f : div_rn(unit, s.norm);
  return s;
}
