// Encodes one vector per warp: from rows loaded in eights to integers, rotated sums, and codes in shared memory.
#pragma once
#include "common/numbers.cuh"
#include "store/fp8.cuh"
#include "store/lloyd.cuh"
#include "vectors/rotation.cuh"
#include "vectors/write.cuh"

DEVICE u32 warp_sum_of(u32 x) { return warp_sum(x); }
DEVICE i64 warp_sum_of(i64 x) {  // each below 2^58
  return (i64)(i32)warp_sum((u32)(x >> 27)) * (1 << 27) + (i64)warp_sum((u32)x & 0x7FFFFFF);
}

template <class F> struct Row {
  static constexpr int TURNS = TURNS_OF<F::D>;
  u32 raw[TURNS][F::RAW];

  DEVICE_MEMBER void load(const u8* row, int lane) {
    UNROLL_FOR (int i = 0; i < TURNS; i++)
      if (has_eight<F::D>(i, lane)) load_eight<F>(row + (32 * i + lane) * 8 * F::ELEMENT, raw[i]);
  }
  DEVICE_MEMBER float number(int i, int n, int lane) const {
    return has_eight<F::D>(i, lane) ? element<F::DTYPE>(raw[i], n) : 0.0f;
  }
};

template <class F> DEVICE u32 largest_of(const float x[Row<F>::TURNS][8]) {
  u32 most = 0;
  UNROLL_FOR (int i = 0; i < 8 * Row<F>::TURNS; i++) most = larger_of(most, as_bits(x[i / 8][i % 8]) & 0x7FFFFFFFu);
  return warp_max(most);
}

template <class F> constexpr int VECTOR_TABLE_BYTES = F::KIND == LLOYD ? (LloydTables<F>::BYTES + 15) / 16 * 16 : 0;

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
    UNROLL_FOR (int i = 0; i < 8 * Row<F>::TURNS; i++) x[i / 8][i % 8] = row.number(i / 8, i % 8, lane);
    const Fp8Scale scale(largest_of<F>(x));
    UNROLL_FOR (int i = 0; i < Row<F>::TURNS; i++) {
      u32 code[8];
      UNROLL_FOR (int n = 0; n < 8; n++) code[n] = fp8_code(x[i][n], scale.up);
      u32* to = (u32*)(codes + code_index(8 * (32 * i + lane)));
      if (has_eight<F::D>(i, lane)) to[0] = four_bytes(code), to[1] = four_bytes(code + 4);
    }
    sync_warp();
    return {scale.field, scale.field == INVALID_FIELD ? 0 : 0xFFFFFFFFu};
  }
};

template <class F, int CORE> struct Encoder<F, CORE, LLOYD> {
  static constexpr int OWN = F::D / 32, TURNS = Row<F>::TURNS, FIXED_BITS = F::SHORT ? 16 : 21;
  const SideArgs& side;
  LloydTables<F> tables;
  i32* numbers;
  u8* codes;
  u32 signs[TURNS];  // for the lane's eights
  const u32* core;   // [CORE]: the signs of a column of the core

  DEVICE_MEMBER Encoder(const SideArgs& side, u8* memory, int warp, int lane, int threads)
      : side(side), tables(memory), numbers((i32*)(memory + VECTOR_TABLE_BYTES<F> + warp * VECTOR_BYTES<F>)),
        codes((u8*)numbers + VECTOR_NUMBER_BYTES<F>), core((const u32*)(side.fragments + F::D / 8)) {
    tables.fill(memory, side, thread_index(), threads);
    UNROLL_FOR (int i = 0; i < TURNS; i++) signs[i] = has_eight<F::D>(i, lane) ? side.fragments[32 * i + lane] : 0;
  }
  DEVICE_MEMBER void start() {
    cp_async_wait<0>();
    sync_threads();
  }

  // Rotates integers in eights; `sums` are in the order "apart".
  DEVICE_MEMBER void rotate(i32 (&x)[TURNS][8], int lane, i32 (&sums)[OWN]) {
    if constexpr (CORE == 1) add_eights(x);
    put_eights<F::D>(numbers, x, lane);
    sync_warp();
    if constexpr (CORE > 1) rotate_by_core<F::D, CORE>(numbers, core, lane);
    UNROLL_FOR (int k = 0; k < OWN; k++) sums[k] = numbers[number_index(dim_of_own<F::D>(lane, k))];
    if constexpr (CORE == 1) add_apart<F::D>(sums, lane);
  }

  DEVICE_MEMBER Encoded encode(const Row<F>& row, int lane) {
    float x[TURNS][8];
    i32 fixed[TURNS][8], sums[OWN];
    UNROLL_FOR (int i = 0; i < 8 * TURNS; i++)
      x[i / 8][i % 8] = signed_by(row.number(i / 8, i % 8, lane), signs[i / 8], i % 8);
    const u32 exponent = largest_of<F>(x) >> 23;
    TokenScalars s;
    s.bad = exponent == 255, s.zero = exponent < LEAST_EXPONENT;
    s.down = as_float(((s.zero ? LEAST_EXPONENT : s.bad ? 254 : exponent) - (FIXED_BITS - 1)) << 23);
    // The power of two that makes the largest magnitude an integer of FIXED_BITS.
    const float up = s.zero ? 0.0f : as_float((253 + FIXED_BITS - (s.bad ? 254 : exponent)) << 23);
    typename Choose<F::SHORT, u32, i64>::Type squares = 0;
    UNROLL_FOR (int i = 0; i < 8 * TURNS; i++) {
      const u32 bits = as_bits(fma_rn(x[i / 8][i % 8], up, 12582912.0f));
      const i32 integer = (i32)(bits - 0x4B400000u);
      fixed[i / 8][i % 8] = integer;
      if constexpr (F::SHORT) {  // rounded to multiples of 256
        const i32 steps = (i32)(as_bits(fma_rn(i32_to_f32_rn(integer), 0.00390625f, 12582912.0f)) - 0x4B400000u);
        squares += (u32)(steps * steps);
      } else squares += (i64)integer * integer;
    }
    rotate(fixed, lane, sums);
    squares = warp_sum_of(squares);
    const float squared = F::SHORT ? mul_rn(i32_to_f32_rn((i32)squares), 65536.0f) : i64_to_f32_rn((i64)squares);
    s.norm = sqrt_rn_normal(max_f32(squared, 1.0f));
    s.factor = s.bad ? 0.0f : div_rn_normal(side.unit, s.norm);  // a bad vector's integers are arbitrary
    const float total = put_codes(s, sums, lane);
    const u32 field = field_of_token(s, total);
    return {field, s.zero || field == INVALID_FIELD ? 0 : 0xFFFFFFFFu};
  }

  // Writes codes to shared memory; returns the sum of their squared levels.
  DEVICE_MEMBER float put_codes(const TokenScalars& s, const i32 (&sums)[OWN], int lane) {
    constexpr bool DOUBLED = F::BITS <= 4;
    typename Choose<DOUBLED, u32, i64>::Type sum = 0;
    // Products of short integers are compared unrounded, as numbers of cells in units of the smallest denormal float.
    const float cells = mul_rn(s.factor, power_of_two(64 + F::CELL_SHIFT - 149));
    UNROLL_FOR (int k = 0; k < OWN; k++) {
      const float rotated = i32_to_f32_rn(sums[k]);
      u32 code;
      if constexpr (F::SHORT) code = tables.cells[ceil_product(rotated * power_of_two(-64), cells, F::CELL_ZERO)];
      else code = code_of<F>(mul_rn(rotated, s.factor), tables);
      codes[code_index(dim_of_own<F::D>(lane, k))] = (u8)code;
      if constexpr (DOUBLED) {
        const u32 level =
            prmt(side.doubled_levels[0], side.doubled_levels[1], code & ((1 << (F::BITS - 1)) - 1)) & 0xFF;
        sum += level * level;
      } else sum += (i64)tables.levels[code] * tables.levels[code];
    }
    sync_warp();
    return total_of_squares(warp_sum_of(sum));
  }
};
