// Vectors to integers, and their exact norm.
//
// 11-bit integers (of 16-bit floats, for codes of up to 4 bits) are halves: the denormal numbers of fp16 and the first
// normal ones are multiples of 2^-24, so converting a float of at most 2^-13 rounds it to such a multiple, and its bits are
// the integer's magnitude and sign.
//
// A 22-bit integer is cut into three digits, fixed = low + 2^8 middle + 2^16 top, of which low and middle are unsigned
// bytes. A float that is 1.5 * 2^23 plus an integer has the integer in its low bits: the digits are its bytes.
#pragma once
#include "store_rows.cuh"

template <class F, bool FEW = F::FEW> struct Digits {  // [chunk][token g or g + 8][first or last four of a lane's eight dimensions]
  typedef i32 Sum;
  u32 low[F::CHUNKS][2][2], middle[F::CHUNKS][2][2], top[F::CHUNKS][2][2];
};
template <class F> struct Digits<F, true> {  // [chunk][token g or g + 8][pair of a lane's eight dimensions]
  typedef float Sum;                         // in units of 2^-24
  u32 halves[F::CHUNKS][2][4];
};
DEVICE float number_of(i32 sum) { return int_to_float_rn(sum); }
DEVICE float number_of(float sum) { return sum; }

struct TokenScalars {  // of the lane's token (lane % 16), in fixed-point units
  float squared, norm;
  float factor;  // what makes a sum a coordinate in the codebook's units
  float down;
  bool zero, bad;
};

DEVICE u32 larger_of(u32 a, u32 b) { return a > b ? a : b; }

// Float32 bits of the largest magnitude among the chunks' values; those of a NaN if there is one.
template <class F> DEVICE u32 largest_of_lane(const u32 raw[F::CHUNKS][2][F::RAW], int half) {
  u32 most = F::NARROW ? raw[0][half][0] : 0, least_one = most;
#pragma unroll
  for (int c = 0; c < F::CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < F::RAW; i++) {
      u32 w = raw[c][half][i];
      if constexpr (F::DTYPE == FLOAT32) most = larger_of(most, w & 0x7FFFFFFFu);
      else if constexpr (F::DTYPE == BFLOAT16) most = larger_bfloats(most, w), least_one = smaller_bfloats(least_one, w);
      else most = larger_halves(most, w), least_one = smaller_halves(least_one, w);
    }
  if constexpr (F::DTYPE == FLOAT32) return most;
  most &= 0x7FFF7FFFu, least_one &= 0x7FFF7FFFu;
  u32 upper = larger_of(as_bits(element<F::DTYPE>(&most, 0)), as_bits(element<F::DTYPE>(&most, 1)));
  return larger_of(upper, larger_of(as_bits(element<F::DTYPE>(&least_one, 0)), as_bits(element<F::DTYPE>(&least_one, 1))));
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

// The sums of a lane's two tokens over the four lanes that have parts of them, in the lane of each token of the tile.
template <class T> DEVICE T sum_of_rows(const T sums[2], int lane) {
  bool high = lane & 1;
  T sum = (high ? sums[1] : sums[0]) + shuffle_xor(high ? sums[0] : sums[1], 1);
  sum += shuffle_xor(sum, 2);
  return shuffle(sum, 4 * (lane & 7) + (lane >> 3 & 1));
}

// The exact sum of squares of the tile's tokens: four products of bytes at a time.
template <class F> DEVICE i32 squared_norms(const Digits<F, true>& d, int lane) {
  i32 sums[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 lows = 0, both = 0, highs = 0;
#pragma unroll
    for (int i = 0; i < 2 * F::CHUNKS; i++) {
      u32 first = d.halves[i / 2][h][2 * (i % 2)], second = d.halves[i / 2][h][2 * (i % 2) + 1];
      u32 low = prmt(first, second, 0x6420), high = prmt(first, second, 0x7531) & 0x7F7F7F7Fu;
      lows = dot_u8(low, low, lows);
      both = dot_u8(low, high, both);
      highs = dot_u8(high, high, highs);
    }
    sums[h] = (i32)(lows + 512 * both + 65536 * highs);
  }
  return sum_of_rows(sums, lane);
}

template <class F> DEVICE i64 squared_norms(const Digits<F, false>& d, int lane) {
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
  return sum_of_rows(sums, lane);
}

DEVICE float rounded(i32 sum) { return int_to_float_rn(sum); }
DEVICE float rounded(i64 sum) { return long_to_float_rn(sum); }

// Eight numbers of a lane's row as 11-bit integers.
template <class F> DEVICE void take_halves(const u32 raw[F::RAW], float up, u32 halves[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (F::DTYPE == BFLOAT16) {  // a power of two leaves them as they are
      u32 scaled = times_bfloats(raw[i], as_bits(up) >> 16 | as_bits(up));
      halves[i] = pack_halves(as_float(scaled << 16), as_float(scaled & 0xFFFF0000u));
    } else {
      halves[i] = pack_halves(mul_rn(element<F::DTYPE>(raw, 2 * i), up), mul_rn(element<F::DTYPE>(raw, 2 * i + 1), up));
    }
  }
}

// Exponents from here on are beyond any scale that a page can hold.
constexpr u32 TOO_LARGE = 240;

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
    // A power of two that brings the largest into [2^20, 2^21), or [2^10, 2^11) units of 2^-24; vectors below 2^-60 are zero.
    if constexpr (F::FEW) {
      float up = exponent < 67 ? 0.0f : as_float((240 - (exponent < TOO_LARGE ? exponent : TOO_LARGE - 1)) << 23);
#pragma unroll
      for (int c = 0; c < F::CHUNKS; c++) take_halves<F>(raw[c][h], up, d.halves[c][h]);
      if (any_lane(exponent >= TOO_LARGE)) {  // whose halves may be anything, and are to be numbers
        sync_warp();                          // keeps the compiler from selecting word by word instead of branching
#pragma unroll
        for (int i = 0; i < 4 * F::CHUNKS; i++)
          if (exponent >= TOO_LARGE) d.halves[i / 4][h][i % 4] = 0;
      }
    } else {
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
  s.bad = exponent >= (F::FEW ? TOO_LARGE : 255);
  s.zero = exponent < 67;
  s.down = as_float(((s.zero ? 67 : s.bad ? 254 : exponent) - (F::FEW ? 10 : 20)) << 23);
  s.squared = rounded(squared_norms<F>(d, lane));
  s.norm = sqrt_rn(s.squared);
  s.factor = s.zero || s.bad ? 0.0f : div_rn(unit, s.norm);
  if (F::FEW) s.factor = mul_rn(s.factor, 16777216.0f);
  return s;
}
