// Products of values and a warp's probabilities.
#pragma once
#include "decode/decode_softmax.cuh"
#include "decode/values.cuh"

typedef Codes<V_BITS, VS, true> ValueCodes;

DEVICE void value_bytes(const ValueCodes& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<V_KIND, V_BITS, true>(codes.low(slice), codes.high(slice), table, first, second);
}

// Adds the products of a slice to the output.
DEVICE void add_products(const i32 (&c)[NG][4], const Probabilities& w, int slice, Accumulator& acc) {
  UNROLL_FOR (int n = 0; n < NG; n++)
    UNROLL_FOR (int j = 0; j < 2; j++)
      acc.out[n][slice][j] =
          fma_rn((float)(256 * c[n][2 * j] + (c[n][2 * j + 1] + w.offset[n])), w.fold[n], acc.out[n][slice][j]);
}

// The bytes of a word alternate between dimensions g and g + 8; they are separated, and two tiles form one operand. Up
// to 4 bits, the codes are separated before the lookup. The tokens of both tiles then alternate, and so must the
// probabilities.
template <class PackedCodes> DEVICE void add_merged_value_bytes(const PackedCodes (&codes)[NT], const Probabilities& w,
    Table table, Accumulator& acc) {
  u32 b[NG][NT / 2][2];
  PackedCodes even[NT / 2], odd[NT / 2];
  UNROLL_FOR (int x = 0; x < NT; x += 2) {
    even[x / 2].template merge<false>(codes[x], codes[x + 1]), odd[x / 2].template merge<true>(codes[x], codes[x + 1]);
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int r = 0; r < 2; r++) b[n][x / 2][r] = prmt(w.p[n][x][0], w.p[n][x + 1][0], r ? 0x7351 : 0x6240);
  }
  UNROLL_FOR (int i = 0; i < VS; i++) {
    i32 c[NG][4];
    UNROLL_FOR (int x = 0; x < NT / 2; x++) {
      u32 a0, a1, a2, a3;
      value_bytes(even[x], i, table, a0, a2);
      value_bytes(odd[x], i, table, a1, a3);
      UNROLL_FOR (int n = 0; n < NG; n++) {
        if (x == 0) mma_u8_u8_from_zero(c[n], a0, a1, a2, a3, b[n][x][0], b[n][x][1]);
        else mma_u8_u8(c[n], a0, a1, a2, a3, b[n][x][0], b[n][x][1]);
      }
    }
    add_products(c, w, i, acc);
  }
}

// The bytes of probabilities in the order of a value word's tokens.
DEVICE u32 in_token_order(u32 p) { return prmt(p, 0, 0x3120); }

// Wider codes are separated after the lookup, as bytes.
DEVICE void add_value_bytes_regrouped(const ValueCodes (&codes)[NT], const Probabilities& w, Table table,
    Accumulator& acc) {
  u32 b[NG][NT];
  UNROLL_FOR (int n = 0; n < NG; n++)
    UNROLL_FOR (int x = 0; x < NT; x++) b[n][x] = in_token_order(w.p[n][x][0]);
  UNROLL_FOR (int i = 0; i < VS; i++) {
    i32 c[NG][4];
    UNROLL_FOR (int x = 0; x < NT; x += 2) {
      u32 first, second, a0, a1, a2 = 0, a3 = 0;
      value_bytes(codes[x], i, table, first, second);
      a0 = prmt(first, second, 0x6420), a1 = prmt(first, second, 0x7531);
      if (x + 1 < NT) {
        value_bytes(codes[x + 1 < NT ? x + 1 : x], i, table, first, second);
        a2 = prmt(first, second, 0x6420), a3 = prmt(first, second, 0x7531);
      }
      UNROLL_FOR (int n = 0; n < NG; n++) {
        const u32 b0 = b[n][x], b1 = x + 1 < NT ? b[n][x + 1 < NT ? x + 1 : x] : 0;
        if (x == 0) mma_u8_u8_from_zero(c[n], a0, a1, a2, a3, b0, b1);
        else mma_u8_u8(c[n], a0, a1, a2, a3, b0, b1);
      }
    }
    add_products(c, w, i, acc);
  }
}

DEVICE void add_value_halves(const ValueCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables,
    Accumulator& acc) {
  UNROLL_FOR (int i = 0; i < VS; i++)
    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 a[4];
      value_halves(codes[x], i, tables, a);
      UNROLL_FOR (int n = 0; n < NG; n++) mma_f16(acc.out[n][i], a[0], a[1], a[2], a[3], w.p[n][x][0], w.p[n][x][1]);
    }
}

// Narrow, values looked up in pairs: dimensions g and g + 8 of a token, in stored order. Two slices form one operand,
// with eight tokens per MMA.
template <class PairCodes>
DEVICE void add_value_pairs_as_stored(const PairCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables,
    Accumulator& acc) {
  UNROLL_FOR (int i = 0; i < VS; i += 2)
    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 first[4], second[4] = {0, 0, 0, 0};
      pair_halves<false>(codes[x], i, tables.value_levels, first);
      if (i + 1 < VS) pair_halves<false>(codes[x], i + 1, tables.value_levels, second);
      UNROLL_FOR (int n = 0; n < NG; n++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const u32 p = w.p[n][x][r], a0 = first[2 * r], a1 = second[2 * r], a2 = first[2 * r + 1],
                    a3 = second[2 * r + 1];
          mma_f16(acc.out[n][i], a0, a1, a2, a3, p & 0xFFFF, p >> 16);
          mma_f16(acc.out[n][i + 1], a0, a1, a2, a3, p << 16, p & 0xFFFF0000u);
        }
    }
}

// Wide, values looked up in pairs from two tiles: a pair is one token of each, and probabilities are paired alike.
template <class PairCodes>
DEVICE void add_merged_value_pairs(const PairCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables,
    Accumulator& acc) {
  UNROLL_FOR (int x = 0; x < NT; x += 2) {
    u32 b[NG][4];
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        b[n][2 * r] = prmt(w.p[n][x][r], w.p[n][x + 1][r], 0x5410),
                 b[n][2 * r + 1] = prmt(w.p[n][x][r], w.p[n][x + 1][r], 0x7632);
    UNROLL_FOR (int i = 0; i < VS; i++) {
      u32 even[4], odd[4];
      merged_pair_halves(codes[x], codes[x + 1], i, tables.value_levels, even, odd);
      UNROLL_FOR (int n = 0; n < NG; n++) {
        mma_f16(acc.out[n][i], even[0], odd[0], even[1], odd[1], b[n][0], b[n][1]);
        mma_f16(acc.out[n][i], even[2], odd[2], even[3], odd[3], b[n][2], b[n][3]);
      }
    }
  }
}

DEVICE void add_values(const u8* slot, const Probabilities& w, const LevelTables& tables, int lane, Accumulator& acc) {
  ValueCodes codes[NT];
  UNROLL_FOR (int x = 0; x < NT; x++) codes[x].load(slot + values_of(x), lane);
  if constexpr (V_BYTES && NT % 2 == 0 && ValueCodes::MERGEABLE) add_merged_value_bytes(codes, w, tables.value, acc);
  else if constexpr (V_BYTES) add_value_bytes_regrouped(codes, w, tables.value, acc);
  else if constexpr (V_IN_PAIRS && !WIDE) add_value_pairs_as_stored(codes, w, tables, acc);
  else if constexpr (V_IN_PAIRS && NT % 2 == 0) add_merged_value_pairs(codes, w, tables, acc);
  else add_value_halves(codes, w, tables, acc);
}
