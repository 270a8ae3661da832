// Products of queries and keys, and masks, for the step of a warp.
#pragma once
#include "decode/scores.cuh"

// The query operand of MMA i for group n: two slices of bytes, or one of halves.
DEVICE void load_operand(const u8* operands, int n, int i, int lane, u32 (&q)[2]) {
  const Words2 words = *(const Words2*)(operands + 8 * (32 * (n * QI + i) + lane));
  q[0] = words.x;
  q[1] = !K_BYTES || 2 * i + 1 < KS ? words.y : 0;
}

// The query operands in registers, unless they stay in shared memory.
struct QueryOperands {
  u32 q[NG][Q_IN_SHARED ? 1 : QI][2];

  DEVICE_MEMBER void load(const u8* operands, int lane) {
    if (!Q_IN_SHARED)
      UNROLL_FOR (int n = 0; n < NG; n++)
        UNROLL_FOR (int i = 0; i < QI; i++) load_operand(operands, n, i, lane, q[n][Q_IN_SHARED ? 0 : i]);
  }
  DEVICE_MEMBER void load_product(const u8* shared, int i, int lane) {
    if (Q_IN_SHARED)
      UNROLL_FOR (int n = 0; n < NG; n++) load_operand(shared + QUERY_AT, n, i, lane, q[n][0]);
  }
};

template <bool BYTES> struct KeyProduct { using Type = float; };
template <> struct KeyProduct<true> { using Type = i32; };

// c = A B if `first`, otherwise c += A B.
DEVICE void add_product(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2], bool first) {
  if (first) mma_u8_s8_from_zero(c, a[0], a[1], a[2], a[3], b[0], b[1]);
  else mma_u8_s8(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}
DEVICE void add_product(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], bool first) {
  if (first) mma_f16_from_zero(c, a[0], a[1], a[2], a[3], b[0], b[1]);
  else mma_f16(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// Products of queries as two signed bytes and levels as bytes, or of queries as halves (narrow: as sums of two halves)
// and levels as halves.
template <class T> DEVICE void multiply_codes(T (&c)[NT][NG][4], const KeyCodes (&codes)[NT], const u8* shared,
    QueryOperands& queries, const LevelTables& tables, int lane) {
  UNROLL_FOR (int i = 0; i < QI; i++) {
    queries.load_product(shared, i, lane);
    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 a[4] = {0, 0, 0, 0};
      if constexpr (K_BYTES)
        UNROLL_FOR (int h = 0; h < (2 * i + 1 < KS ? 2 : 1); h++)
          code_bytes<K_KIND, K_BITS, true>(codes[x].low(2 * i + h), codes[x].high(2 * i + h), tables.key, a[2 * h],
              a[2 * h + 1]);
      else key_halves(codes[x], i, tables, a);
      UNROLL_FOR (int n = 0; n < NG; n++) add_product(c[x][n], a, queries.q[n][Q_IN_SHARED ? 0 : i], i == 0);
    }
  }
}

DEVICE void multiply_keys(const u8* slot, const u8* shared, QueryOperands& queries, const LevelTables& tables, int lane,
    StepScores& s) {
  KeyCodes codes[NT];
  UNROLL_FOR (int x = 0; x < NT; x++) codes[x].load(slot + keys_of(x), lane);
  typename KeyProduct<K_BYTES>::Type c[NT][NG][4];
  multiply_codes(c, codes, shared, queries, tables, lane);
  UNROLL_FOR (int x = 0; x < NT; x++)
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        UNROLL_FOR (int j = 0; j < OWN; j++)
          s[n * OWN + j][x][r] = WIDE ? c[x][n][2 * r + j]
              : K_BYTES               ? (float)(128 * c[x][n][2 * r] + c[x][n][2 * r + 1])
                                      : c[x][n][2 * r] + c[x][n][2 * r + 1];
}

// Masks hidden tokens and tokens marked as NaN; `clear`: no token is hidden. This is the only branch of a step.
DEVICE void apply_mask(const u8* slot, const u8* shared, int token0, bool clear, int lane, StepScores& s,
    u32& largest_fields) {
  if (clear) {
    constexpr int WORDS = FIELDS * FIELD_STRIDE / 4;
    UNROLL_FOR (int p = 0; p < PIECES; p++)
      UNROLL_FOR (int i = 0; i < WORDS; i += 32)
        if (i + 32 <= WORDS || i + lane < WORDS)
          largest_fields = max_u16x2(largest_fields, *(const u32*)(slot + FIELDS_AT + 4 * (i + lane) + p * PIECE));
  } else mask_tokens(slot, shared, token0, lane, s);
}
