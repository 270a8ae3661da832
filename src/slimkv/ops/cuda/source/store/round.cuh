// Query-aware rounding of 32 tokens by one warp (query_aware.cuh). Each lane itself computes the corrections of slice s
// for errors of slice s + 1, which are still in its registers, so that no slice waits for MMAs of the previous one.
#pragma once
#include "store/lloyd.cuh"

// A cell for codes of more than 4 bits, with at most one boundary: the centroids times error_steps, and the codes,
// below and above the boundary.
struct alignas(16) CellRecord {
  float bound, below, above;
  u32 codes;  // below: in the low half; above: in the high half
};

// A head's matrix, int8 [D][D]: copied to shared memory (SHARED_WEIGHTS), or in global memory.
template <class F> struct Weights {
  static constexpr int STRIDE =
      SHARED_WEIGHTS ? F::D + 16 : F::D;  // bytes of a row; padded in shared memory against bank conflicts
  static constexpr int SHARED_BYTES = SHARED_WEIGHTS ? F::D * STRIDE : 0;
  const u8* matrix;
  u32 at;  // its address in shared memory
  DEVICE_MEMBER Weights(const u8* shared, const u8* global) : matrix(SHARED_WEIGHTS ? shared : global), at(0) {
    if constexpr (SHARED_WEIGHTS) at = settled(shared_address(shared));
  }
  DEVICE_MEMBER static void copy(u8* shared, const u8* from, int thread, int threads) {
    if constexpr (SHARED_WEIGHTS) {
#pragma unroll 1
      for (int i = thread; i < F::D * F::D / 16; i += threads)
        cp_async_16(shared + 16 * i / F::D * STRIDE + 16 * i % F::D, from + 16 * i);
      cp_async_commit();
    }
  }
  // The weights of row i for slice s, or for the last slice if s is beyond it.
  DEVICE_MEMBER Words4 row(int i, int s) const {
    const int from = i * STRIDE + 16 * min_i32(s, F::D / 16 - 1);
    if constexpr (SHARED_WEIGHTS) return ld_shared_constant_16(at + from);
    else return ldg_cached(matrix + from);
  }
  DEVICE_MEMBER u32 word(int i, int d) const {
    if constexpr (SHARED_WEIGHTS) return *(const u32*)(matrix + i * STRIDE + d);
    else return ldg_word(matrix + i * STRIDE + d);
  }
};

template <class F> struct QueryAwareMemory {
  // Words between tokens, padded so that lanes that load 16 bytes each have no bank conflicts.
  static constexpr int STRIDE = F::D + 4, SUM_STRIDE = 20;
  static constexpr int NUMBERS = 32 * STRIDE * 4, SUMS = 2 * 32 * SUM_STRIDE * 4;
  static constexpr int BYTES = NUMBERS + SUMS;
  float* numbers;  // [32][STRIDE]: coordinates in the codebook's units, then codes
  i32* sums;  // [2][32][SUM_STRIDE]: corrections of slices s and s - 1, as integer products
  u8* weights;  // the matrix, if it is copied
  // ``block``: the memory of the matrix and of all pairs of warps; this is for pair ``number``.
  DEVICE_MEMBER QueryAwareMemory(u8* block, int number)
      : numbers((float*)(block + Weights<F>::SHARED_BYTES + number * BYTES)), sums((i32*)((u8*)numbers + NUMBERS)),
        weights(block) {}
  DEVICE_MEMBER void put_neighbours(int token, int d, float x, float y) const {
    *(Words2*)(numbers + token * STRIDE + d) = {as_bits(x), as_bits(y)};
  }
  // The packed codes of dimensions 2 pair and 2 pair + 1 of a token's slice.
  DEVICE_MEMBER const u8* codes(int token, int slice, int pair) const {
    return (const u8*)(numbers + token * STRIDE + 16 * slice) + pair * CODE_WORDS<F> / 2;
  }
  // The errors of a finished slice of a row, 16 signed bytes. Like the codes before them, they replace its coordinates.
  DEVICE_MEMBER u32* errors(int row, int slice) const { return (u32*)numbers + row * STRIDE + 16 * slice + 4; }
};

// Centroids times error_steps, after the other tables in shared memory. Up to 4 bits they are indexed by cell, so that
// the critical path has only one lookup, otherwise by code. With few tokens, 5 and 6 bits leave room for CellRecords.
template <class F> struct ScaledLevels {
  static constexpr bool BY_CELL = F::BITS <= 4, RECORDS = CELL_RECORDS && !BY_CELL;
  static constexpr int TABLE_BYTES =
      (LloydTables<F>::BYTES + (RECORDS ? 16 * F::CELLS : 4 * (BY_CELL ? F::CELLS : 1 << F::BITS)) + 15) / 16 * 16;
  u8* levels;

  DEVICE_MEMBER ScaledLevels(u8* memory) : levels(memory + LloydTables<F>::BYTES) {}
  DEVICE_MEMBER void fill(const SideArgs& side, float error_steps, int thread, int threads) const {
    if constexpr (BY_CELL || RECORDS) {
#pragma unroll 1
      for (int i = thread; i < F::CELLS / (RECORDS ? 1 : 4); i += threads)
        cp_async_16(levels + 16 * i, side.cells + LloydTables<F>::CELL_BYTES + 16 * i);
      cp_async_commit();
    } else
#pragma unroll 1
      for (int i = thread; i < 1 << F::BITS; i += threads)
        ((float*)levels)[i] = mul_rn(i32_to_f32_rn(side.levels[i]), mul_rn(error_steps, 1.0f / 128));
  }
  // The level and the code of a number in a cell. The level comes first, because the next coordinate waits for it.
  DEVICE_MEMBER float find(float x, u32 cell, const LloydTables<F>& tables, u32& code) const {
    if constexpr (RECORDS) {
      const CellRecord record = ((const CellRecord*)levels)[cell];
      const bool above = x > record.bound;
      code = above ? record.codes >> 16 : record.codes & 0xFFFF;
      return above ? record.above : record.below;
    } else {
      float level;
      if constexpr (BY_CELL) level = ((const float*)levels)[cell];
      code = code_of_cell<F>(cell, x, tables);
      return BY_CELL ? level : ((const float*)levels)[code];
    }
  }
};
// (level - x) times error_steps, rounded once; `level` includes the factor. error_steps is a power of two, so its
// products are exact.
DEVICE float error_of(float x, float error_steps, float level) { return fma_rn(x, -error_steps, level); }

// Corrections of slice s for errors of slices from s + 2 on, of 32 tokens x 16 coordinates, in fragment order. MMAs
// run during slice s + 1, when all these errors exist, for two slices per coordinate, so that nothing waits for them.
// Branches would keep the compiler from interleaving them with the rounding, so other slices get zero weights instead.
template <class F> struct LaterErrors {
  static constexpr int SLICES = F::D / 16, STEPS = (SLICES + 1) / 2, FIRST_AT = 10;
  static_assert(STEPS <= 8, "sums are there when they are stored");
  i32 c[2][2][4];  // tiles of 16 tokens, halves of the slice
  u32 b[STEPS][2][2];  // halves of the slice, slices 2 k and 2 k + 1

  DEVICE_MEMBER void load(const Weights<F>& weights, int s, int lane) {
    const int row = 16 * max_i32(s, 0) + (lane >> 2), first = 4 * (lane & 3);
    UNROLL_FOR (int i = 0; i < 4; i++)
      UNROLL_FOR (int k = 1; k < STEPS; k++)
        b[k][i >> 1][i & 1] =
            2 * k + (i & 1) < SLICES ? weights.word(row + 8 * (i >> 1), first + 32 * k + 16 * (i & 1)) : 0;
  }
  // Slices 2 k and 2 k + 1.
  DEVICE_MEMBER void add(const QueryAwareMemory<F>& memory, int s, int k, int lane) {
    u32 weights[2][2];
    UNROLL_FOR (int i = 0; i < 4; i++) weights[i >> 1][i & 1] = 2 * k + (i & 1) >= s + 2 ? b[k][i >> 1][i & 1] : 0;
    UNROLL_FOR (int tile = 0; tile < 2; tile++) {
      const int row = 16 * tile + (lane >> 2), t = lane & 3, second = min_i32(2 * k + 1, SLICES - 1);
      const u32 a0 = memory.errors(row, 2 * k)[t], a1 = memory.errors(row + 8, 2 * k)[t];
      const u32 a2 = memory.errors(row, second)[t], a3 = memory.errors(row + 8, second)[t];
      UNROLL_FOR (int h = 0; h < 2; h++) mma_s8_s8(c[tile][h], a0, a1, a2, a3, weights[h][0], weights[h][1]);
    }
  }
  // Stores a quarter of the sums.
  DEVICE_MEMBER void store(const QueryAwareMemory<F>& memory, int quarter, i32* to, int lane) const {
    const int g = lane >> 2, t = lane & 3, tile = quarter >> 1, half = quarter & 1;
    UNROLL_FOR (int i = 0; i < 2; i++)
      *(Words2*)(to + (16 * tile + g + 8 * i) * memory.SUM_STRIDE + 8 * half + 2 * t) = {(u32)c[tile][half][2 * i],
          (u32)c[tile][half][2 * i + 1]};
  }
  // The part of the work that overlaps coordinate n of slice s + 1.
  DEVICE_MEMBER void go_on(const QueryAwareMemory<F>& memory, int s, int n, i32* to, int lane) {
    if (n == FIRST_AT)
      UNROLL_FOR (int i = 0; i < 16; i++) c[i >> 3][i >> 2 & 1][i & 3] = 0;
    const int k = FIRST_AT + 1 - n;
    if (k >= 1 && k < STEPS) add(memory, s, k, lane);
    if (n < 4) store(memory, 3 - n, to, lane);
  }
};

// Replaces the coordinates of each lane's token by codes, if the token is ``mine``.
template <class F> DEVICE void round_query_aware(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables,
    const ScaledLevels<F>& levels, const u8* matrix, float error_steps, bool mine, int lane) {
  constexpr float LIMIT = (float)(F::CELL_ZERO - 2) / (1 << F::CELL_SHIFT);  // above the last boundary, in the cells
  float back = div_rn(1.0f / 64, error_steps);  // a power of two
  LaterErrors<F> sums = {};
  const Weights<F> weights(memory.weights, matrix);
  u32 errors[4] = {};
  i32 *here = memory.sums, *ahead = memory.sums + 32 * memory.SUM_STRIDE;
  UNROLL_FOR (int i = 0; i < 4; i++) *(Words4*)(here + lane * memory.SUM_STRIDE + 4 * i) = {0, 0, 0, 0};
#pragma unroll 1
  for (int s = F::D / 16 - 1; s >= 0; s--) {
    float* own = memory.numbers + lane * memory.STRIDE + 16 * s;
    // Only sums are stored before the slice is finished, because the compiler moves no loads above stores.
    float numbers[16];
    i32 later[16];
    u32 packed[CODE_WORDS<F>] = {};
    sync_warp();
    sums.load(weights, s - 1, lane);
    UNROLL_FOR (int i = 3; i >= 0; i--) {
      const Words4 four = *(const Words4*)(here + lane * memory.SUM_STRIDE + 4 * i), x = *(const Words4*)(own + 4 * i);
      later[4 * i] = (i32)four.x, later[4 * i + 1] = (i32)four.y, later[4 * i + 2] = (i32)four.z,
                later[4 * i + 3] = (i32)four.w;
      numbers[4 * i] = as_float(x.x), numbers[4 * i + 1] = as_float(x.y), numbers[4 * i + 2] = as_float(x.z),
                  numbers[4 * i + 3] = as_float(x.w);
    }
    const u32 before[4] = {errors[0], errors[1], errors[2], errors[3]};  // errors of slice s + 1
    errors[0] = errors[1] = errors[2] = errors[3] = 0;  // without the newest error, which is a float
    float newest = 0.0f;
    u32 newest_byte = 0;
    Words4 own_weights = weights.row(16 * s + 15, s), next_weights = weights.row(16 * s + 15, s + 1);
    UNROLL_FOR (int n = 15; n >= 0; n--) {
      const Words4 w = own_weights, v = next_weights;
      if (n > 0) {  // before any store
        own_weights = weights.row(16 * s + n - 1, s);
        next_weights = weights.row(16 * s + n - 1, s + 1);
      }
      const i32 older =
          dp4a_s8(before[0], v.x, dp4a_s8(before[1], v.y, dp4a_s8(before[2], v.z, dp4a_s8(before[3], v.w, later[n]))));
      const float total = add_errors_of_slice(n, older, w, newest, newest_byte, errors);
      float x = numbers[n];
      float target = fma_rn(total, -back, x), within = min_f32(target, LIMIT);  // cell_from_below bounds it below
      const u32 cell = cell_from_below<F>(within);
      u32 code;
      const float level = levels.find(within, cell, tables, code);
      float unlimited = error_of(x, error_steps, level), error = min_f32(max_f32(unlimited, -127.0f), 127.0f);
      packed[n * CODE_WORDS<F> / 16] += code << (2 * CODE_WORDS<F> * n % 32);
      const float rounded = add_rn(error, 12582912.0f);
      newest = sub_rn(rounded, 12582912.0f);
      newest_byte = as_bits(rounded);
      sums.go_on(memory, s - 1, n, ahead, lane);
    }
    errors[0] = prmt(errors[0], newest_byte, 0x3214);
    if (mine) {
      if constexpr (CODE_WORDS<F> == 2) *(Words2*)own = {packed[0], packed[1]};
      else *(Words4*)own = {packed[0], packed[1], packed[2], packed[3]};
      *(Words4*)memory.errors(lane, s) = {errors[0], errors[1], errors[2], errors[3]};
    }
    i32* const swapped = here;
    here = ahead, ahead = swapped;
  }
}
