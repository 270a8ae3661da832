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

DEVICE void key_bytes(const KeyCodes& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<K_KIND, K_BITS, true>(codes.low(slice), codes.high(slice), table, first, second);
}

// Queries as two signed bytes times levels as bytes.
DEVICE void multiply_key_bytes(const KeyCodes (&codes)[NT], const u8* shared, QueryOperands& queries,
    const LevelTables& tables, int lane, StepScores& s) {
  i32 c[NT][NG][4];
  UNROLL_FOR (int i = 0; i < QI; i++) {
    queries.load_product(shared, i, lane);
    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 a[4] = {0, 0, 0, 0};
      key_bytes(codes[x], 2 * i, tables.key, a[0], a[1]);
      if (2 * i + 1 < KS) key_bytes(codes[x], 2 * i + 1, tables.key, a[2], a[3]);
      UNROLL_FOR (int n = 0; n < NG; n++) {
        const u32 b0 = queries.q[n][Q_IN_SHARED ? 0 : i][0], b1 = queries.q[n][Q_IN_SHARED ? 0 : i][1];
        if (i == 0) mma_u8_s8_from_zero(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
        else mma_u8_s8(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
  }
  UNROLL_FOR (int x = 0; x < NT; x++)
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int r = 0; r < 2; r++) s[n][x][r] = (float)(128 * c[x][n][2 * r] + c[x][n][2 * r + 1]);
}

// Queries as halves (narrow: as sums of two halves) times levels as halves.
DEVICE void multiply_key_halves(const KeyCodes (&codes)[NT], const u8* shared, QueryOperands& queries,
    const LevelTables& tables, int lane, StepScores& s) {
  float c[NT][NG][4];
  UNROLL_FOR (int i = 0; i < QI; i++) {
    queries.load_product(shared, i, lane);
    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 a[4];
      key_halves(codes[x], i, tables, a);
      UNROLL_FOR (int n = 0; n < NG; n++) {
        const u32 b0 = queries.q[n][Q_IN_SHARED ? 0 : i][0], b1 = queries.q[n][Q_IN_SHARED ? 0 : i][1];
        if (i == 0) mma_f16_from_zero(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
        else mma_f16(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
  }
  UNROLL_FOR (int x = 0; x < NT; x++)
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        UNROLL_FOR (int j = 0; j < OWN; j++)
          s[n * OWN + j][x][r] = WIDE ? c[x][n][2 * r + j] : c[x][n][2 * r] + c[x][n][2 * r + 1];
}

DEVICE void multiply_keys(const u8* slot, const u8* shared, QueryOperands& queries, const LevelTables& tables, int lane,
    StepScores& s) {
  KeyCodes codes[NT];
  UNROLL_FOR (int x = 0; x < NT; x++) codes[x].load(slot + keys_of(x), lane);
  if constexpr (K_BYTES) multiply_key_bytes(codes, shared, queries, tables, lane, s);
  else multiply_key_halves(codes, shared, queries, tables, lane, s);
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
