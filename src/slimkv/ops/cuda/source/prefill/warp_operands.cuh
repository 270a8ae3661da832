// Operands of mma.sync in shared memory: fp16, or bytes (EIGHT_BIT).
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

constexpr int K_STEPS = EIGHT_BIT ? D / 32 : PLACES / 16;  // steps of 32 bytes of a row

// A warp reads only the queries that it wrote.
DEVICE void queries_are_written(int) { sync_warp(); }

// The ldmatrix address of a lane's first 16-byte unit in rows of 128 bytes (tiles.cuh); addresses of further units
// differ in other bits. ldmatrix loads four 8 x 8 matrices of 16-bit elements (or pairs of bytes): the second pair has
// the next columns of queries and values, and the next rows of keys.
DEVICE u32 by_columns(u32 tile, int row, int lane) {
  return tile + (row + lane % 16) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}
DEVICE u32 by_rows(u32 tile, int lane) {
  return tile + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
}

// A warp's queries, 16 rows of each of BLOCKS row blocks: kept in registers (HELD_QUERIES), or loaded for each tile.
template <int BLOCKS> struct Queries {
  u32 address, held[HELD_QUERIES ? K_STEPS : 1][BLOCKS][4];

  DEVICE_MEMBER Queries(u32 operand, int lane) : address(by_columns(operand, thread_index() / 32 % 4 * 16, lane)) {
    UNROLL_FOR (int k = 0; HELD_QUERIES && k < K_STEPS; k++)
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) load(k, b, held[k][b]);
  }
  DEVICE_MEMBER void load(int k, int b, u32 (&q)[4]) const {
    ldmatrix_x4(q, (address ^ k % 4 * 32) + b * CONSUMERS * QUERY_BYTES + k / 4 * 128 * GROUP_ROWS);
  }
  DEVICE_MEMBER void get(int k, int b, u32 (&q)[4]) const {
    if constexpr (HELD_QUERIES)
      UNROLL_FOR (int i = 0; i < 4; i++) q[i] = held[k][b][i];
    else load(k, b, q);
  }
};
