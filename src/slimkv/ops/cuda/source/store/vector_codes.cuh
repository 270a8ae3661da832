// One vector in a warp: loaded in eights, rotated, and its codes in shared memory.
//
// A Hadamard matrix that doubles a CORE is additions of pairs, CORE 2^i apart. A lane adds those that it loaded, and, after an
// exchange by way of shared memory, those of its D / 32 numbers b + 8 k + D / 4 h (of lane 8 h + b), then those of other h.
#pragma once
#include "common/numbers.cuh"
#include "store/fp8.cuh"
#include "store/lloyd.cuh"
#include "store/vector_pages.cuh"

DEVICE u32 warp_sum_of(u32 x) { return warp_sum(x); }
DEVICE i64 warp_sum_of(i64 x) {  // each below 2^58
  return (i64)(i32)warp_sum((u32)(x >> 27)) * (1 << 27) + (i64)warp_sum((u32)x & 0x7FFFFFF);
}

DEVICE void add_pair(i32& a, i32& b) {
  i32 difference = a - b;
  a += b, b = difference;
}
template <int COUNT> DEVICE void add_pairs(i32 (&x)[COUNT]) {
#pragma unroll
  for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!(i & step)) add_pair(x[i], x[i + step]);
}

template <class F> struct Row {
  static constexpr int EIGHTS = F::D / 8, TURNS = (EIGHTS + 31) / 32;
  u32 raw[TURNS][F::RAW];

  DEVICE_MEMBER static bool has(int turn, int lane) { return EIGHTS % 32 == 0 || 32 * turn + lane < EIGHTS; }
  DEVICE_MEMBER void load(const u8* row, int lane) {
#pragma unroll
    for (int i = 0; i < TURNS; i++)
      if (has(i, lane)) load_eight<F>(row + (32 * i + lane) * 8 * F::ELEMENT, raw[i]);
  }
  DEVICE_MEMBER float number(int i, int n, int lane) const { return has(i, lane) ? element<F::DTYPE>(raw[i], n) : 0.0f; }
};

template <class F> DEVICE u32 largest_of(const float x[Row<F>::TURNS][8]) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 8 * Row<F>::TURNS; i++) most = larger_of(most, as_bits(x[i / 8][i % 8]) & 0x7FFFFFFFu);
  return warp_max(most);
}

// The work space of a warp: numbers, 2 words between 32 of them so that strides do not meet in a bank, and codes.
template <class F> constexpr int VECTOR_NUMBER_BYTES = F::KIND == LLOYD ? 4 * (F::D + (F::D + 31) / 32 * 2) : 0;
template <class F> constexpr int VECTOR_BYTES = F::KIND == RAW ? 0 : (VECTOR_NUMBER_BYTES<F> + VECTOR_CODE_BYTES<F> + 15) / 16 * 16;
template <class F> constexpr int VECTOR_TABLE_BYTES = F::KIND == LLOYD ? (LloydTables<F>::BYTES + 15) / 16 * 16 : 0;
DEVICE int number_index(int dim) { return dim + (dim >> 5) * 2; }

template <class F, int CORE, int KIND = F::KIND> struct Encoder {  // raw: nothing to encode
  DEVICE_MEMBER Encoder(const SideArgs&, u8*, int, int, int) {}
  DEVICE_MEMBER void start() {}
};

template <class F, int CORE> struct Encoder<F, CORE, FP8> {
  u8* codes;
  DEVICE_MEMBER Encoder(const SideArgs&, u8* memory, int warp, int, int) : codes(memory + warp * VECTOR_BYTES<F>) {}
  DEVICE_MEMBER void start() {}

  DEVICE_MEMBER Encoded encode(const Row<F>& row, int lane) {
    float x[Row<F>::TURNS][8];
#pragma unroll
    for (int i = 0; i < 8 * Row<F>::TURNS; i++) x[i / 8][i % 8] = row.number(i / 8, i % 8, lane);
    const Fp8Scale scale(largest_of<F>(x));
#pragma unroll
    for (int i = 0; i < Row<F>::TURNS; i++) {
      u32 code[8];
#pragma unroll
      for (int n = 0; n < 8; n++) code[n] = fp8_code(x[i][n], scale.up);
      u32* to = (u32*)(codes + code_index(8 * (32 * i + lane)));
      if (Row<F>::has(i, lane))
        to[0] = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24, to[1] = code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24;
    }
    sync_warp();
    return {scale.field, scale.field == INVALID_FIELD ? 0 : 0xFFFFFFFFu};
  }
};

template <class F, int CORE> struct Encoder<F, CORE, LLOYD> {
  static constexpr int OWN = F::D / 32, POWER = F::D / CORE, TURNS = Row<F>::TURNS, FIXED_BITS = F::SHORT ? 16 : 21;
  static_assert(F::D % 32 == 0 && CORE <= 32 && POWER <= (CORE == 1 ? 512 : 32), "what lanes hold");
  const SideArgs& side;
  LloydTables<F> tables;
  i32* numbers;
  u8* codes;
  u32 signs[TURNS];  // of the lane's eights
  const u32* core;   // [CORE]: the signs of a column of the core

  DEVICE_MEMBER Encoder(const SideArgs& side, u8* memory, int warp, int lane, int threads)
      : side(side), tables(memory), numbers((i32*)(memory + VECTOR_TABLE_BYTES<F> + warp * VECTOR_BYTES<F>)),
        codes((u8*)numbers + VECTOR_NUMBER_BYTES<F>), core((const u32*)(side.fragments + F::D / 8)) {
    tables.fill(memory, side, thread_index(), threads);
#pragma unroll
    for (int i = 0; i < TURNS; i++) signs[i] = Row<F>::has(i, lane) ? side.fragments[32 * i + lane] : 0;
  }
  DEVICE_MEMBER void start() {
    cp_async_wait<0>();
    sync_threads();
  }

  DEVICE_MEMBER void rotate_core(int lane) {
    if (lane < POWER) {
      i32 x[CORE], sums[CORE];
#pragma unroll
      for (int i = 0; i < CORE; i++) x[i] = numbers[number_index(CORE * lane + i)];
#pragma unroll
      for (int c = 0; c < CORE; c++) {
        u32 negative = core[c];
        sums[c] = 0;
#pragma unroll
        for (int i = 0; i < CORE; i++) sums[c] += negative >> i & 1 ? -x[i] : x[i];
      }
#pragma unroll
      for (int c = 0; c < CORE; c++) numbers[number_index(CORE * lane + c)] = sums[c];
    }
    sync_warp();
    if (lane < CORE) {
      i32 x[POWER];
#pragma unroll
      for (int i = 0; i < POWER; i++) x[i] = numbers[number_index(CORE * i + lane)];
      add_pairs(x);
#pragma unroll
      for (int i = 0; i < POWER; i++) numbers[number_index(CORE * i + lane)] = x[i];
    }
    sync_warp();
  }

  DEVICE_MEMBER static int dim_of_own(int lane, int k) { return (lane & 7) + 8 * k + 8 * OWN * (lane >> 3); }

  // Integers in eights to the lane's sums.
  DEVICE_MEMBER void rotate(i32 (&x)[TURNS][8], int lane, i32 (&sums)[OWN]) {
    if constexpr (CORE == 1) {
#pragma unroll
      for (int i = 0; i < TURNS; i++) add_pairs(x[i]);
      if constexpr (TURNS == 2)
#pragma unroll
        for (int n = 0; n < 8; n++) add_pair(x[0][n], x[1][n]);
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++)
      if (Row<F>::has(i, lane))
#pragma unroll
        for (int n = 0; n < 8; n += 2) *(Words2*)(numbers + number_index(8 * (32 * i + lane)) + n) = {(u32)x[i][n], (u32)x[i][n + 1]};
    sync_warp();
    if constexpr (CORE > 1) rotate_core(lane);
#pragma unroll
    for (int k = 0; k < OWN; k++) sums[k] = numbers[number_index(dim_of_own(lane, k))];
    if constexpr (CORE == 1) {
      add_pairs(sums);
#pragma unroll
      for (int step = 8; step < (TURNS == 2 ? 16 : 32); step *= 2)
#pragma unroll
        for (int k = 0; k < OWN; k++) {
          i32 other = shfl_xor(sums[k], step);
          sums[k] = (lane & step ? -sums[k] : sums[k]) + other;
        }
    }
  }

  DEVICE_MEMBER Encoded encode(const Row<F>& row, int lane) {
    float x[TURNS][8];
    i32 fixed[TURNS][8], sums[OWN];
#pragma unroll
    for (int i = 0; i < 8 * TURNS; i++) x[i / 8][i % 8] = signed_by(row.number(i / 8, i % 8, lane), signs[i / 8], i % 8);
    const u32 exponent = largest_of<F>(x) >> 23;
    TokenScalars s;
    s.bad = exponent == 255, s.zero = exponent < LEAST_EXPONENT;
    s.down = as_float(((s.zero ? LEAST_EXPONENT : s.bad ? 254 : exponent) - (FIXED_BITS - 1)) << 23);
    // A power of two that makes the largest an integer of FIXED_BITS.
    const float up = s.zero ? 0.0f : as_float((253 + FIXED_BITS - (s.bad ? 254 : exponent)) << 23);
    typename Choose<F::SHORT, u32, i64>::Type squares = 0;
#pragma unroll
    for (int i = 0; i < 8 * TURNS; i++) {
      const u32 bits = as_bits(fma_rn(x[i / 8][i % 8], up, 12582912.0f));
      const i32 integer = (i32)(bits - 0x4B400000u);
      fixed[i / 8][i % 8] = integer;
      if constexpr (F::SHORT) {  // in steps of 256
        const i32 steps = (i32)(as_bits(fma_rn(i32_to_f32_rn(integer), 0.00390625f, 12582912.0f)) - 0x4B400000u);
        squares += (u32)(steps * steps);
      } else squares += (i64)integer * integer;
    }
    rotate(fixed, lane, sums);
    squares = warp_sum_of(squares);
    s.squared = F::SHORT ? mul_rn(i32_to_f32_rn((i32)squares), 65536.0f) : i64_to_f32_rn((i64)squares);
    s.squared = max_f32(s.squared, 1.0f);
    s.norm = sqrt_rn_normal(s.squared);
    s.factor = s.bad ? 0.0f : div_rn_normal(side.unit, s.norm);  // the integers of what is bad may be anything
    const float total = put_codes(s, sums, lane);
    const u32 field = field_of_token<F>(s, total, side);
    return {field, s.zero || field == INVALID_FIELD ? 0 : 0xFFFFFFFFu};
  }

  // Codes to shared memory; what the policy sums.
  DEVICE_MEMBER float put_codes(const TokenScalars& s, const i32 (&sums)[OWN], int lane) {
    constexpr bool DOUBLED = F::BITS <= 4 && F::POLICY == NORM;
    typename Choose<DOUBLED, u32, i64>::Type sum = 0;
    // Short integers' products are compared as they are: as numbers of cells, in units of the smallest float.
    const float cells = mul_rn(s.factor, power_of_two(64 + F::CELL_SHIFT - 149));
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      const float rotated = i32_to_f32_rn(sums[k]);
      u32 code;
      if constexpr (F::SHORT) code = tables.cells[ceil_product(rotated * power_of_two(-64), cells, F::CELL_ZERO)];
      else code = code_of<F>(mul_rn(rotated, s.factor), tables);
      codes[code_index(dim_of_own(lane, k))] = (u8)code;
      if constexpr (DOUBLED) {
        const u32 level = prmt(side.doubled_levels[0], side.doubled_levels[1], code & ((1 << (F::BITS - 1)) - 1)) & 0xFF;
        sum += level * level;
      } else if constexpr (F::POLICY == NORM) sum += (i64)tables.levels[code] * tables.levels[code];
      else if constexpr (F::POLICY == UNBIASED) sum += (i64)f32_to_i32_rz(rotated) * tables.levels[code];
    }
    sync_warp();
    return F::POLICY == PLAIN ? 0.0f : policy_total(warp_sum_of(sum));
  }
};
