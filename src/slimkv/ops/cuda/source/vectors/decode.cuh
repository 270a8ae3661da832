// Codes in shared memory to the numbers of a vector, in eights.
#pragma once
#include "common/numbers.cuh"
#include "vectors/read.cuh"
#include "vectors/rotation.cuh"

struct GatherSide {
  u8* x;  // [tokens, heads, D], strides in bytes
  i64 stride, head_stride;
  const u8* signs;    // [D / 8] bytes: of the dimensions; then [CORE] words: of every row of the core
  const i32* levels;  // [2 ** BITS]: by code, times LEVEL_DENOMINATOR
  float unit;         // what a sum of such levels is multiplied by beside the scale
};

template <class F> DEVICE void store_words(u8* p, const u32 (&words)[F::RAW]) {
  if constexpr (F::VECTORS) {
    UNROLL_FOR (int i = 0; i < F::RAW; i += 4)
      *(Words4*)(p + 4 * i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  } else {
    UNROLL_FOR (int i = 0; i < F::RAW; i++) {
      if constexpr (F::NARROW) ((u16*)p)[2 * i] = (u16)words[i], ((u16*)p)[2 * i + 1] = (u16)(words[i] >> 16);
      else ((u32*)p)[i] = words[i];
    }
  }
}
// Eight numbers as they are, from shared memory.
template <class F> DEVICE void copy_eight(u8* p, const u8* from) {
  u32 words[F::RAW];
  UNROLL_FOR (int i = 0; i < F::RAW; i++) words[i] = ((const u32*)from)[i];
  store_words<F>(p, words);
}

// Eight numbers in the output's type.
template <class F> DEVICE void store_eight(u8* p, const float x[8]) {
  u32 words[F::RAW];
  UNROLL_FOR (int n = 0; n < F::RAW; n++) {
    if constexpr (F::DTYPE == FLOAT32) words[n] = as_bits(x[n]);
    else words[n] = F::DTYPE == BFLOAT16 ? pack_bf16x2(x[2 * n], x[2 * n + 1]) : pack_f16x2(x[2 * n], x[2 * n + 1]);
  }
  store_words<F>(p, words);
}

template <class F, int CORE, bool UNROTATE, int RAW_DTYPE> struct Decoder {
  static constexpr int TURNS = TURNS_OF<F::D>, OWN = F::D / 32, LEVELS = F::KIND == LLOYD ? 1 << F::BITS : 0;
  static constexpr int TABLE_BYTES = 4 * LEVELS;
  static constexpr int NUMBER_BYTES = UNROTATE ? VECTOR_NUMBER_BYTES<F> : 0;
  static constexpr int CODE_BYTES = F::KIND == RAW ? F::D * F::BITS / 8 : VECTOR_CODE_BYTES<F>;
  static constexpr int BYTES = (NUMBER_BYTES + CODE_BYTES + 15) / 16 * 16;
  const GatherSide& side;
  const i32* levels;
  i32* numbers;
  u8* codes;
  u32 signs[TURNS];

  DEVICE_MEMBER Decoder(const GatherSide& side, u8* memory, int warp, int lane, int threads)
      : side(side), levels((const i32*)memory), numbers((i32*)(memory + (TABLE_BYTES + 15) / 16 * 16 + warp * BYTES)),
        codes((u8*)numbers + NUMBER_BYTES) {
#pragma unroll 1
    for (int i = thread_index(); i < LEVELS; i += threads) ((i32*)memory)[i] = side.levels[i];
    UNROLL_FOR (int i = 0; i < TURNS; i++)
      signs[i] = UNROTATE && has_eight<F::D>(i, lane) ? side.signs[32 * i + lane] : 0;
    sync_threads();
  }

  // Rotated back by exact sums.
  DEVICE_MEMBER void unrotate(i32 (&x)[TURNS][8], int lane) {
    i32 own[OWN];
    UNROLL_FOR (int k = 0; k < OWN; k++) own[k] = levels[codes[code_index(dim_of_own<F::D>(lane, k))]];
    if constexpr (CORE == 1) add_apart<F::D>(own, lane);
    UNROLL_FOR (int k = 0; k < OWN; k++) numbers[number_index(dim_of_own<F::D>(lane, k))] = own[k];
    sync_warp();
    if constexpr (CORE > 1) rotate_by_core<F::D, CORE>(numbers, (const u32*)(side.signs + F::D / 8), lane);
    take_eights<F::D>(numbers, x, lane);
    if constexpr (CORE == 1) add_eights(x);
  }

  DEVICE_MEMBER void decode(const Units<F>& units, u8* row, int lane) {
    units.put(codes, lane);
    i32 sums[TURNS][8];
    if constexpr (UNROTATE) unrotate(sums, lane);
    const float scale = F::KIND == LLOYD ? mul_rn(units.scale(), side.unit) : F::KIND == FP8 ? units.scale() : 1.0f;
    UNROLL_FOR (int i = 0; i < TURNS; i++) {
      const int first = 8 * (32 * i + lane);
      if (!has_eight<F::D>(i, lane)) continue;
      float x[8];
      UNROLL_FOR (int n = 0; n < 8; n++) {
        if constexpr (F::KIND == RAW && F::BITS == 32) x[n] = ((const float*)codes)[first + n];
        else if constexpr (F::KIND == RAW) x[n] = load_number(codes, first + n, RAW_DTYPE);
        else {
          const u32 code = UNROTATE ? 0 : codes[code_index(first + n)];
          if constexpr (F::KIND == FP8)
            x[n] = mul_rn(f16_to_f32((code & 0x80) << 8 | (code & 0x7F) << 7) * 256.0f, scale);
          else x[n] = mul_rn(signed_by(i32_to_f32_rn(UNROTATE ? sums[i][n] : levels[code]), signs[i], n), scale);
        }
      }
      if constexpr (F::KIND == RAW && RAW_DTYPE == F::DTYPE)
        copy_eight<F>(row + first * F::ELEMENT, codes + first * F::ELEMENT);
      else store_eight<F>(row + first * F::ELEMENT, x);
    }
    sync_warp();  // read: the next vector may take their place
  }

  DEVICE_MEMBER void clear(u8* row, int lane) const {
    const float zeros[8] = {};
    UNROLL_FOR (int i = 0; i < TURNS; i++)
      if (has_eight<F::D>(i, lane)) store_eight<F>(row + 8 * (32 * i + lane) * F::ELEMENT, zeros);
  }
};
