// The compile-time format of one side (keys or values) of a store, and the distribution of its values over a warp.
//
// A warp processes a tile of 16 tokens. Of each slice of 16 dimensions, lane 4 g + t holds the eight values of its word
// in the page, in the page's order (n = 0 .. 7):
//   keys:    tokens g, g + 8 (n / 4), dimensions 2 t, 2 t + 1, 2 t + 8, 2 t + 9 (n % 4);
//   values:  tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 (n / 2), dimensions g, g + 8 (n % 2).
// Both are MMA accumulator layouts, for the product of a tile with a matrix and for its transpose.
// Per-token numbers (scales, slots) are computed by lanes 0 .. 15, one token each, and duplicated in lanes 16 .. 31.
#pragma once
#include "common/types.cuh"

constexpr u32 LEAST_EXPONENT = 67;  // of float32: vectors below 2^-60 are zero

// The 16-bit scales that pages store beside the codes (see slimkv.codec.scale16).
DEVICE u32 encode_unsigned(float x) {
  u32 bits = as_bits(x);
  i32 rounded = (i32)((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (87 << 10);
  bool over = rounded >= (i32)INVALID_FIELD || (bits & 0x7F800000u) == 0x7F800000u;
  return over ? INVALID_FIELD : rounded < 1 << 10 ? 0 : (u32)rounded;
}

// The index of a lane's word in a plane: groups of four, two and one words per lane (docs/design/page-format.md).
DEVICE int fragment_word(int word, int lane, int words) {
  int quads = words & ~3, pairs = words & ~1;
  return word < quads ? (word >> 2) * 128 + lane * 4 + (word & 3)
      : word < pairs  ? quads * 32 + lane * 2 + (word & 1)
                      : pairs * 32 + lane;
}

struct SideArgs {
  const u8* x;  // [tokens, heads, D], strides in bytes
  i64 stride, head_stride;
  const u16* offset;  // bfloat16 [heads, D], subtracted from the vectors; or null
  // The rotation in fragment order: bytes [GROUPS][SLICES][STEPS][32 lanes][16], then 64 times it; for short integers,
  // 16-bit floats that represent its signs (store/integers.cuh), [GROUPS][SLICES][STEPS][2][32 lanes][8].
  const u8* fragments;
  const u8* cells;  // [CELLS]: the code (up to 4 bits), or the number of boundaries below the cell
  const float* bounds;  // [2 ** BITS]: ascending, and infinity (5 bits and more)
  const i32* levels;  // [2 ** BITS]: levels by code, times LEVEL_DENOMINATOR
  float unit;
  u32 doubled_levels[2];  // twice the positive levels, in bytes (up to 4 bits)
  // 256, 1 and -1, unknown to the compiler: multiplications by them do shifts and sums outside the logic units, which
  // are the bottleneck.
  u32 by_256;
  i32 one, minus_one;
};

struct StoreArgs {
  SideArgs key, value;
  u8* pages;
  i64 page_stride, page_head_stride;
  const void* slots;
  const u8* query_aware;  // int8 [matrices, heads, D, D] of the keys
  const i32* query_aware_index;  // [tokens]: the matrix; null: the first
  i64 matrix_stride;  // bytes between the matrices of a head
  float error_steps;
  i32 tokens, matrices;
  i32 heads, spread;  // spread: every matrix has its own thread blocks, which store only the tokens that use it
};

// SPLIT warps share a tile; each processes PER slices of every group.
template <bool VALUES_, int D_, int GROUPS_, int PER_, int KIND_, int BITS_, int CODES_, int FIELDS_, int DTYPE_,
    bool VECTORS_, int CELL_SHIFT_, int CELL_ZERO_>
struct Format {
  static constexpr bool VALUES = VALUES_;
  static constexpr int D = D_, GROUPS = GROUPS_, PER = PER_, KIND = KIND_, BITS = BITS_, CODES = CODES_,
                       FIELDS = FIELDS_, DTYPE = DTYPE_, CELL_SHIFT = CELL_SHIFT_, CELL_ZERO = CELL_ZERO_;
  static constexpr bool VECTORS = VECTORS_;  // rows start at multiples of 16 bytes
  static constexpr bool NARROW = DTYPE != FLOAT32;
  static constexpr bool SHORT =
      KIND == LLOYD && BITS <= 4 && NARROW && D <= 256;  // rotated as 16-bit integers, not 22-bit ones
  static constexpr int ELEMENT = NARROW ? 2 : 4;
  static constexpr int INNER = D / GROUPS;  // the rotation is a Hadamard matrix of GROUPS times one of INNER
  static constexpr int SLICES = INNER / 16;  // per group
  static constexpr int SPLIT = SLICES / PER;
  static constexpr int LOCAL = PER * GROUPS;  // slices that a warp ends up with
  static constexpr bool ONE_SLICE =
      KIND == LLOYD && BITS > 4 && PER == 1 && SPLIT > 1 && (SPLIT & (SPLIT - 1)) == 0;  // per warp (slices.cuh)
  static constexpr int STEPS = (INNER + 31) / 32;  // MMAs along a group
  static constexpr int CHUNKS = GROUPS * STEPS;  // 32 dimensions each, of which a lane loads eight
  static constexpr int RAW = NARROW ? 4 : 8;  // words of these eight
  static constexpr int TOKENS = VALUES ? 4 : 2;  // per lane
  static constexpr int CELLS = 2 * CELL_ZERO;
  static constexpr int TILE_BYTES = 2 * D * BITS;
  static constexpr int FOUR = BITS < 8 ? BITS / 4 : 0, TWO = BITS < 8 ? BITS % 4 / 2 : 0, ONE = BITS < 8 ? BITS % 2 : 0;
  static constexpr int FRAGMENT_BYTES = GROUPS * SLICES * STEPS * 512;
  static_assert(D % (16 * GROUPS) == 0 && SLICES % PER == 0 && (GROUPS == 1 || SPLIT == 1), "how a tile is cut");
};

// The tile's token to which a lane's value 2 j (VALUES) or 4 j (keys) belongs.
template <class F> DEVICE int token_of(int lane, int j) {
  return F::VALUES ? 2 * (lane & 3) + (j & 1) + 8 * (j >> 1) : (lane >> 2) + 8 * j;
}
template <class F> DEVICE constexpr int token_number(int n) { return F::VALUES ? n >> 1 : n >> 2; }
template <class F> DEVICE int dim_of(int lane, int n) {
  return F::VALUES ? (lane >> 2) + 8 * (n & 1) : 2 * (lane & 3) + (n & 1) + 8 * (n >> 1 & 1);
}

// Sums over the four lanes that share tokens g and g + 8. Lanes k and k + 16 receive the sum of token k.
template <class T> DEVICE T sum_of_rows(const T x[2], int lane) {
  bool high = lane & 1;
  T sum = (high ? x[1] : x[0]) + shfl_xor(high ? x[0] : x[1], 1);
  sum += shfl_xor(sum, 2);
  return shfl(sum, 4 * (lane & 7) + (lane >> 3 & 1));
}

// Sums over the lanes that hold a token. Lanes k and k + 16 receive the sum of token k.
template <class F, class T> DEVICE T sum_of_token(const T x[F::TOKENS], int lane) {
  if constexpr (!F::VALUES) return sum_of_rows(x, lane);
  else {
    int token = lane & 15;
    bool high = lane & 16, odd = lane & 8;
    T a = (high ? x[2] : x[0]) + shfl_xor(high ? x[0] : x[2], 16);
    T b = (high ? x[3] : x[1]) + shfl_xor(high ? x[1] : x[3], 16);
    T c = (odd ? b : a) + shfl_xor(odd ? a : b, 8);
    c += shfl_xor(c, 4);
    return shfl(c, 8 * (token & 1) + 16 * (token >> 3) + (token & 7) / 2);
  }
}
