// The query operands of a team, all scaled by one unit.
#pragma once
#include "decode/queries.cuh"

// Turns the queries of a range, in the lanes' registers, into operands of one unit. STAGED: queries pass through
// shared memory, so that a rolled loop handles all of them: fetching the unrolled, cold instructions is slow.
template <int QUERIES>
DEVICE void prepare_queries(const DecodeArgs& args, const DecodeRange& range, const float (&query)[QUERIES][QN],
    u8* shared, int warp, int lane) {
  const float infinity = as_float(0x7F800000u);
  float* scratch = (float*)(shared + PROBABILITIES_AT) + warp * KD;
  constexpr bool STAGED = COLUMNS > 32 && 4 * KD * (WARPS + COLUMNS) <= RINGS_AT - PROBABILITIES_AT;
  float* const rotated = (float*)(shared + PROBABILITIES_AT) + WARPS * KD + warp * KD + lane;
  if (STAGED) {
    UNROLL_FOR (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
        UNROLL_FOR (int j = 0; j < QN; j++)
          if (lane + 32 * j < KD) rotated[i * WARPS * KD + 32 * j] = query[i][j];
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      float* const place = rotated + (column - warp) * KD;
      float y[QN];
      UNROLL_FOR (int j = 0; j < QN; j++) y[j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      const float largest = rotate_query(args, y, scratch, lane);
      UNROLL_FOR (int j = 0; j < QN; j++)
        if (lane + 32 * j < KD) place[32 * j] = y[j];
      if (lane == 0) *column_at(shared, column) = {largest < infinity ? largest : 0.0f, largest, 0, 0};
    }
  }
  float y[QUERIES][QN], largest[QUERIES], all = 0;
  if (!STAGED)
    UNROLL_FOR (int i = 0; i < QUERIES; i++) {
      UNROLL_FOR (int j = 0; j < QN; j++) y[i][j] = query[i][j];
      largest[i] = rotate_query(args, y[i], scratch, lane);
      if (lane == 0 && warp + i * WARPS < COLUMNS)
        column_at(shared, warp + i * WARPS)->unit = largest[i] < infinity ? largest[i] : 0.0f;
    }
  sync_threads();
  UNROLL_FOR (int c = 0; c < COLUMNS; c += 32)
    if (c + 32 <= COLUMNS || c + lane < COLUMNS) all = max_f32(all, column_at(shared, c + lane)->unit);
  UNROLL_FOR (int d = 16; d; d >>= 1) all = max_f32(all, shfl_xor(all, d));
  sync_threads();  // columns have been read
  if (STAGED) {
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      const float* const place = rotated + (column - warp) * KD;
      const bool finite = column_at(shared, column)->sum < infinity;
      sync_warp();
      UNROLL_FOR (int j = 0; j < QN; j++) y[0][j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      write_query(args, range, column, y[0], all, finite, shared, shared + QUERY_AT, lane);
    }
  } else
    UNROLL_FOR (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
        write_query(args, range, warp + i * WARPS, y[i], all, largest[i] < infinity, shared, shared + QUERY_AT, lane);
}
