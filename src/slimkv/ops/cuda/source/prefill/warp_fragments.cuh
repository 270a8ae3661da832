// Operands of mma.sync: rows of 128 bytes in shared memory (tiles.cuh), four 8 x 8 matrices of 16-bit elements at a
// time.
#pragma once
#include "common/intrinsics.cuh"

// The first 16-byte unit of a lane's row; further units of the tile differ in other bits. For queries, probabilities
// and values the second pair of matrices has other columns, for keys other rows.
DEVICE u32 by_columns(u32 tile, int row, int lane) {
  return tile + (row + lane % 16) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}
DEVICE u32 by_rows(u32 tile, int lane) {
  return tile + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
}
