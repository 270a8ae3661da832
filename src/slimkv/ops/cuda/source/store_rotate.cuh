// Vectors to 22-bit integers, their exact rotation and their exact norm, on the tensor cores.
//
// An integer is cut into three digits, fixed = low + 2^8 middle + 2^16 top, of which low and middle are unsigned bytes; the
// matrix has entries +-1, so products of bytes, summed in 32 bits and put together by shifts, are the exact sums. A float
// that is 1.5 * 2^23 plus an integer has the integer in its low bits: the digits are its bytes.
#pragma once
#include "store_format.cuh"

template <class F> struct Digits {  // [chunk][token g or g + 8][first or last four of a lane's eight dimensions]
  u32 low[F::CHUNKS][2][2], middle[F::CHUNKS][2][2], top[F::CHUNKS][2][2];
};

struct TokenScalars {  // of the lane's token (lane % 16), in fixed-point units
  float squared, norm, factor, down;
  bool zero, bad;
};

template <class F> DEVICE void load_eight(const u8* p, u32 raw[F::RAW]) {
  if constexpr (F::VECTORS) {
#pragma unroll
    for (int i = 0; i < F::RAW / 4; i++) {
      Words4 w = load_once(p + 16 * i);
      raw[4 * i] = w.x, raw[4 * i + 1] = w.y, raw[4 * i + 2] = w.z, raw[4 * i + 3] = w.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < F::RAW; i++)
      raw[i] = F::NARROW ? ((const u16*)p)[2 * i] | (u32)((const u16*)p)[2 * i + 1] << 16 : ((const u32*)p)[i];
  }
}

template <int DTYPE> DEVICE float element(const u32* raw, int i) {
  if constexpr (DTYPE == FLOAT32) return as_float(raw[i]);
  else if constexpr (DTYPE == BFLOAT16) return as_float(i & 1 ? raw[i / 2] & 0xFFFF0000u : raw[i / 2] << 16);
  else return half_to_float(i & 1 ? raw[i / 2] >> 16 : raw[i / 2] & 0xFFFFu);
}

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

// The rows of tokens g and g + 8 in eights: chunk c, dimensions 8 t .. 8 t + 7 of its 32.
template <class F> DEVICE void load_rows(const SideArgs& side, int head, int first, int tokens, int lane,
                                         u32 raw[F::CHUNKS][2][F::RAW]) {
  const u8* x = side.x + head * side.head_stride;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int token = first + (lane >> 2) + 8 * half;
    const u8* row = x + token * side.stride;
#pragma unroll
    for (int c = 0; c < F::CHUNKS; c++) {
      int within = c % F::STEPS * 32 + 8 * (lane & 3);
      if (token < tokens && (F::INNER % 32 == 0 || within < F::INNER))
        load_eight<F>(row + (c / F::STEPS * F::INNER + within) * F::ELEMENT, raw[c][half]);
      else
#pragma unroll
        for (int i = 0; i < F::RAW; i++) raw[c][half][i] = 0;
    }
  }
}

// The same rows by way of shared memory, ahead of their use: a lane copies what it will need itself, and waits for no other.
template <class F> struct RowBuffer {
  static constexpr int PIECES = F::RAW / 4, BYTES = F::VECTORS ? F::CHUNKS * 2 * PIECES * 512 : 0;
  u8* memory;

  DEVICE_MEMBER void fetch(const SideArgs& side, int head, int first, int tokens, int lane) const {
    if constexpr (F::VECTORS) {
#pragma unroll
      for (int i = 0; i < 2 * F::CHUNKS; i++) {
        int c = i / 2, token = first + (lane >> 2) + 8 * (i & 1), within = c % F::STEPS * 32 + 8 * (lane & 3);
        const u8* from = side.x + head * side.head_stride + token * side.stride + (c / F::STEPS * F::INNER + within) * F::ELEMENT;
        bool real = token < tokens && (F::INNER % 32 == 0 || within < F::INNER);
#pragma unroll
        for (int j = 0; j < PIECES; j++) copy_async_16_if(real, memory + (i * PIECES + j) * 512 + 16 * lane, from + 16 * j);
      }
    }
    copy_async_commit();
  }
  DEVICE_MEMBER void take(const SideArgs& side, int head, int first, int tokens, int lane, u32 raw[F::CHUNKS][2][F::RAW]) const {
    copy_async_wait<0>();
    if constexpr (!F::VECTORS) return load_rows<F>(side, head, first, tokens, lane, raw);
#pragma unroll
    for (int i = 0; i < 2 * F::CHUNKS; i++)
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        Words4 w = *(const Words4*)(memory + (i * PIECES + j) * 512 + 16 * lane);
        u32* to = raw[i / 2][i & 1] + 4 * j;
        to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
      }
  }
};

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

// The exact sum of squares of the tile's tokens, in the lane of each: four products of bytes at a time.
template <class F> DEVICE i64 squared_norms(const Digits<F>& d, int lane) {
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
  bool high = lane & 1;
  i64 sum = (high ? sums[1] : sums[0]) + shuffle_xor(high ? sums[0] : sums[1], 1);
  sum += shuffle_xor(sum, 2);
  return shuffle(sum, 4 * (lane & 7) + (lane >> 3 & 1));
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
    // A power of two that brings the largest into [2^20, 2^21); vectors below 2^-60 are zero.
    float up = exponent < 67 ? 0.0f : as_float((274 - (exponent < 254 ? exponent : 254)) << 23);
#pragma unroll
    for (int c = 0; c < F::CHUNKS; c++)
#pragma unroll
      for (int r = 0; r < 2; r++) take_digits<F>(raw[c][h], 4 * r, up, d.low[c][h][r], d.middle[c][h][r], d.top[c][h][r]);
  }
  int token = lane & 15, from = 4 * (token & 7);
  u32 first = shuffle(exponents[0], from), second = shuffle(exponents[1], from);
  u32 exponent = token < 8 ? first : second;
  TokenScalars s;
  s.bad = exponent == 255;
  s.zero = exponent < 67;
  s.down = as_float(((s.zero ? 67 : s.bad ? 254 : exponent) - 20) << 23);
  s.squared = long_to_float_rn(squared_norms<F>(d, lane));
  s.norm = sqrt_rn(s.squared);
  s.factor = s.zero || s.bad ? 0.0f : div_rn(unit, s.norm);
  return s;
}

template <class F> DEVICE void multiply(i32 c[2][4], const u32 d[2][2], Words4 m, int kind) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (F::VALUES) {  // rows are dimensions, columns tokens 8 i .. 8 i + 7
      if (kind == 0) mma_s8_s8(c[i], m.x, m.y, m.z, m.w, d[i][0], d[i][1]);
      else mma_s8_u8(c[i], m.x, m.y, m.z, m.w, d[i][0], d[i][1]);
    } else {                    // rows are tokens, columns dimensions 8 i .. 8 i + 7
      u32 b0 = i ? m.z : m.x, b1 = i ? m.w : m.y;
      if (kind == 0) mma_s8_s8(c[i], d[0][0], d[1][0], d[0][1], d[1][1], b0, b1);
      else mma_u8_s8(c[i], d[0][0], d[1][0], d[0][1], d[1][1], b0, b1);
    }
  }
}

DEVICE void scale(i32 c[2][4], u32 by) {
#pragma unroll
  for (int i = 0; i < 8; i++) c[i / 4][i % 4] = (i32)((u32)c[i / 4][i % 4] * by);
}

// Slices s, s + SLICES, ... of the rotated tile: exact integers, in the page's order.
template <class F> DEVICE void rotate_slices(const Digits<F>& d, const SideArgs& side, int s, int lane, i32 out[F::GROUPS][8]) {
#pragma unroll
  for (int q = 0; q < F::GROUPS; q++) {
    const u8* at = side.fragments + ((q * F::SLICES + s) * F::STEPS * 32 + lane) * 16;
    Words4 ones[F::STEPS];
#pragma unroll
    for (int k = 0; k < F::STEPS; k++) ones[k] = load_often(at + 512 * k);
    i32 c[2][4] = {};
#pragma unroll
    for (int k = 0; k < F::STEPS; k++)  // 2^16 top is 2^8 (64 * 4 top), or 2^15 (2 top)
      multiply<F>(c, d.top[q * F::STEPS + k], F::NARROW ? load_often(at + F::FRAGMENT_BYTES + 512 * k) : ones[k], 0);
    if constexpr (!F::NARROW) scale(c, 128);
#pragma unroll
    for (int k = 0; k < F::STEPS; k++) multiply<F>(c, d.middle[q * F::STEPS + k], ones[k], 1);
    scale(c, side.by_256);
#pragma unroll
    for (int k = 0; k < F::STEPS; k++) multiply<F>(c, d.low[q * F::STEPS + k], ones[k], 1);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) out[q][F::VALUES ? 4 * i + 2 * (k & 1) + (k >> 1) : 4 * (k >> 1) + 2 * i + (k & 1)] = c[i][k];
  }
#pragma unroll
  for (int step = 1; step < F::GROUPS; step *= 2)
#pragma unroll
    for (int q = 0; q < F::GROUPS; q++)
      if (!(q & step))
#pragma unroll
        for (int n = 0; n < 8; n++) {
          i32 a = out[q][n], b = out[q + step][n];
          out[q][n] = step == 1 ? a * side.one + b : a + b;
          out[q + step][n] = step == 1 ? b * side.minus_one + a : a - b;
        }
}
