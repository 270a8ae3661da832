// Query-aware rounding of 32 tokens by a warp (query_aware.cuh) with a matrix that stays in global memory, but for what slices have of
// themselves: there is no room for it beside others.
#pragma once
#include "store/lloyd.cuh"

template <class F> struct QueryAwareMemory {
  static constexpr int STRIDE = 36;  // of a dimension's 32 tokens, in words: no two lanes meet in a bank
  static constexpr int ERROR_STRIDE = 2 * STRIDE;  // of four dimensions' errors: likewise
  static constexpr int NUMBERS = F::D * STRIDE * 4, SUMS = 16 * STRIDE * 4, BYTES = NUMBERS + SUMS + 16 * F::D, MATRIX = 0;
  float* numbers;  // [D][STRIDE]: coordinates in the codebook's units, then codes
  i32* sums;       // [16][STRIDE]: corrections of a slice by later ones, in steps
  u8* weights;     // [D][16]: of the matrix, what slices have of themselves
  // ``block``: the memory of all pairs, of which this is the ``number``-th.
  DEVICE_MEMBER QueryAwareMemory(u8* block, int number)
      : numbers((float*)(block + number * BYTES)), sums((i32*)((u8*)numbers + NUMBERS)), weights((u8*)sums + SUMS) {}
  DEVICE_MEMBER void put_neighbours(int token, int d, float x, float y) const { numbers[d * STRIDE + token] = x, numbers[(d + 1) * STRIDE + token] = y; }
  // The codes of neighbours 2 pair and 2 pair + 1 of a token's slice, packed.
  DEVICE_MEMBER const u8* codes(int token, int slice, int pair) const {
    constexpr int BYTES_OF_TWO = CODE_WORDS<F> / 2;
    return (const u8*)(numbers + (16 * slice + pair * BYTES_OF_TWO / 4) * STRIDE + token) + pair * BYTES_OF_TWO % 4;
  }
  // [4][ERROR_STRIDE]: the errors of a slice when it is done, signed bytes: behind codes, where coordinates of the same tokens were.
  DEVICE_MEMBER u32* errors(int slice) const { return (u32*)numbers + (16 * slice + CODE_WORDS<F>) * STRIDE; }
  // For the threads of a pair, and for those of the block.
  DEVICE_MEMBER void copy_weights(const u8* from, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < F::D; i += threads) cp_async_16(weights + 16 * i, from + i * F::D + i / 16 * 16);
    cp_async_commit();
  }
  DEVICE_MEMBER static void copy_matrix(u8*, const u8*, int, int) {}
  // Of row i, what its own slice has.
  DEVICE_MEMBER Words4 own_weights(int i) const { return *(const Words4*)(weights + 16 * i); }
};

// What levels are, behind the other tables: up to 4 bits twice the level by cell, a signed byte, so that one look-up leads to
// the next coordinate; else the level times error_steps by code.
template <class F> struct ScaledLevels {
  static constexpr bool BY_CELL = F::BITS <= 4;
  static constexpr int TABLE_BYTES = (LloydTables<F>::BYTES + (BY_CELL ? F::CELLS : 4 << F::BITS) + 15) / 16 * 16;
  u8* levels;

  DEVICE_MEMBER ScaledLevels(u8* memory) : levels(memory + LloydTables<F>::BYTES) {}
  DEVICE_MEMBER void fill(const SideArgs& side, float error_steps, int thread, int threads) const {
    if constexpr (BY_CELL) {
#pragma unroll 1
      for (int i = thread; i < F::CELLS / 16; i += threads) cp_async_16(levels + 16 * i, side.cells + LloydTables<F>::CELL_BYTES + 16 * i);
      cp_async_commit();
    } else
#pragma unroll 1
      for (int i = thread; i < 1 << F::BITS; i += threads)
        ((float*)levels)[i] = mul_rn(i32_to_f32_rn(side.levels[i]), mul_rn(error_steps, 1.0f / 128));
  }
  // The level less x, times error_steps, rounded once: error_steps is a power of two, and so are products with it exact.
  DEVICE_MEMBER float error(float x, float error_steps, u32 cell, u32 code) const {
    if constexpr (BY_CELL) return fma_rn(i32_to_f32_rn(((const signed char*)levels)[cell]), mul_rn(error_steps, 0.5f), mul_rn(x, -error_steps));
    else return fma_rn(x, -error_steps, ((const float*)levels)[code]);
  }
};

// What errors of later slices add to slice s, 32 tokens by 16 coordinates, as the tensor cores have it. Two slices are summed
// at a time. Weights are loaded when slice s + 1 begins; slices that were done then, but for an odd one, are summed in the
// middle of it, and the rest at its end. Nothing of that is a branch, so that it goes on beside the rounding: of slices that
// do not count, weights are zeros.
template <class F> struct LaterErrors {
  static constexpr int SLICES = F::D / 16, STEPS = (SLICES + 1) / 2;
  i32 c[2][2][4];      // tiles of 16 tokens, halves of the slice
  u32 b[STEPS][2][2];  // halves of the slice, slices 2 k and 2 k + 1
  u32 last[2][2];      // the same of s + 1 and s + 2

  DEVICE_MEMBER void load(const u8* weights, int s, int lane) {
    const u8* rows = weights + (16 * max_i32(s, 0) + (lane >> 2)) * F::D + 4 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u8* half = rows + 8 * (i >> 1) * F::D;
      last[i >> 1][i & 1] = ldg_word(half + 16 * min_i32(s + 1 + (i & 1), SLICES - 1));
#pragma unroll
      for (int k = 1; k < STEPS; k++) b[k][i >> 1][i & 1] = 2 * k + (i & 1) < SLICES ? ldg_word(half + 32 * k + 16 * (i & 1)) : 0;
    }
  }
  DEVICE_MEMBER void add(const QueryAwareMemory<F>& memory, int slice, u32 b[2][2], int lane) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const int at = (lane & 3) * memory.ERROR_STRIDE + 16 * tile + (lane >> 2);
      const u32 *first = memory.errors(slice) + at, *second = memory.errors(min_i32(slice + 1, SLICES - 1)) + at;
#pragma unroll
      for (int h = 0; h < 2; h++) mma_s8_s8(c[tile][h], first[0], first[8], second[0], second[8], b[h][0], b[h][1]);
    }
  }
  DEVICE_MEMBER void begin(const QueryAwareMemory<F>& memory, int s, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) c[i >> 3][i >> 2 & 1][i & 3] = 0;
#pragma unroll
    for (int k = 1; k < STEPS; k++) {
#pragma unroll
      for (int i = 0; i < 4; i++) b[k][i >> 1][i & 1] = 2 * k > s + 1 ? b[k][i >> 1][i & 1] : 0;
      add(memory, 2 * k, b[k], lane);
    }
  }
  // The rest; to memory.sums.
  DEVICE_MEMBER void end(const QueryAwareMemory<F>& memory, int s, int lane) {
    int g = lane >> 2, t = lane & 3;
    if (s + 1 < SLICES) {  // saves the first slice's share
#pragma unroll
      for (int h = 0; h < 2; h++) last[h][1] = s % 2 == 1 && s + 2 < SLICES ? last[h][1] : 0;
      add(memory, min_i32(s + 1, SLICES - 1), last, lane);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
      memory.sums[(8 * (i >> 2 & 1) + 2 * t + (i & 1)) * memory.STRIDE + 16 * (i >> 3) + g + 8 * (i >> 1 & 1)] = c[i >> 3][i >> 2 & 1][i & 3];
  }
};

// Replaces the coordinates of a token for each lane by codes; of those that are not ``mine``, nothing changes.
template <class F> DEVICE void round_query_aware(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables, const ScaledLevels<F>& levels, const u8* weights,
                                            float error_steps, bool mine, int lane) {
  constexpr float LIMIT = (float)(F::CELL_ZERO - 2) / (1 << F::CELL_SHIFT);  // beyond the last boundary, within the cells
  float back = div_rn(1.0f / 64, error_steps);  // a power of two
  constexpr int MIDDLE = 6;  // weights have come from far by then
  LaterErrors<F> sums = {};
#pragma unroll 1
  for (int s = F::D / 16 - 1; s >= 0; s--) {
    float* own = memory.numbers + 16 * s * memory.STRIDE + lane;
    // Nothing is stored before the slice is done: the compiler would not load what comes next before that.
    float numbers[16];
    i32 later[16];
    u32 packed[CODE_WORDS<F>] = {};
    sums.end(memory, s, lane);
    sync_warp();
#pragma unroll
    for (int n = 15; n >= 0; n--) {
      later[n] = memory.sums[n * memory.STRIDE + lane];
      numbers[n] = own[n * memory.STRIDE];
    }
    sums.load(weights, s - 1, lane);
    u32 errors[4] = {};  // without the newest, which is a float
    float newest = 0.0f;
    u32 newest_byte = 0;
#pragma unroll
    for (int n = 15; n >= 0; n--) {
      if (n == MIDDLE) sums.begin(memory, s - 1, lane);
      Words4 w = memory.own_weights(16 * s + n);
      const float total = add_errors_of_slice(n, later[n], w, newest, newest_byte, errors);
      float x = numbers[n];
      float target = fma_rn(total, -back, x), within = min_f32(target, LIMIT);  // below, cells end by themselves
      const u32 cell = cell_from_below<F>(within);
      const u32 code = code_of_cell<F>(cell, within, tables);
      packed[n * CODE_WORDS<F> / 16] += code << (2 * CODE_WORDS<F> * n % 32);
      float unlimited = levels.error(x, error_steps, cell, code), error = min_f32(max_f32(unlimited, -127.0f), 127.0f);
      const float rounded = add_rn(error, 12582912.0f);
      newest = sub_rn(rounded, 12582912.0f);
      newest_byte = as_bits(rounded);
    }
    if (mine)
#pragma unroll
      for (int n = 0; n < CODE_WORDS<F>; n++) own[n * memory.STRIDE] = as_float(packed[n]);
    errors[0] = prmt(errors[0], newest_byte, 0x3214);
    if (mine)
#pragma unroll
      for (int i = 0; i < 4; i++) memory.errors(s)[i * memory.ERROR_STRIDE + lane] = errors[i];
    sync_warp();
  }
}
