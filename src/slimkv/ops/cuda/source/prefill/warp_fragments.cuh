// Operands of products of single warps: rows of 128 bytes in shared memory (tiles.cuh), four matrices of 8 x 8 halves at a time.
#pragma once
#include "common/intrinsics.cuh"

// Where a lane's rows of 16-byte units begin; the tile's next units are those with other bits. Of queries, probabilities and values the second
// pair of matrices has other columns, of keys other rows.
DEVICE u32 by_columns(u32 tile, int row, int lane) {
  return tile + (row + lane % 16) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}
DEVICE u32 by_rows(u32 tile, int lane) {
  return tile + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
}
