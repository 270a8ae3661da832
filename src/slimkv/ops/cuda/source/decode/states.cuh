// Softmax states (maxima and sums) of a thread block's warps in shared memory.
#pragma once
#include "decode/output.cuh"
#include "decode/warp_state.cuh"

// Merges the maximum and the sum of a column over the warps.
DEVICE void sum_of_warps(const float* states, int column, float& all_max, float& all_sum) {
  all_max = MINUS_INFINITY, all_sum = 0;
  for (int w = 0; w < WORKERS; w++) all_max = max_f32(all_max, states[STATE_WORDS * (w * COLUMNS + column)]);
  for (int w = 0; w < WORKERS; w++) {
    const float* state = states + STATE_WORDS * (w * COLUMNS + column);
    all_sum = fma_rn(state[1], MergedState::factor(state[0], state[1], all_max), all_sum);
  }
}

// Writes the softmax states of a warp's columns.
DEVICE void store_states(const ColumnState& columns, RunningSoftmax& acc, float* states, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const bool marked =
      warp_any(acc.largest_fields >> 16 == INVALID_FIELD || (acc.largest_fields & 0xFFFF) == INVALID_FIELD);
  UNROLL_FOR (int c = 0; c < C; c++) {
    if (marked) acc.row_sum[c] = NOT_A_NUMBER;
    if (MAX_WITHOUT_UNIT && acc.row_max[c] != MINUS_INFINITY) acc.row_max[c] *= columns.unit_of(c);
    UNROLL_FOR (int d = 4; d < 32; d <<= 1)
      acc.row_sum[c] += shfl_xor(acc.row_sum[c], d), acc.shift[c] += shfl_xor(acc.shift[c], d);
    float* state = states + STATE_WORDS * (warp * COLUMNS + own_column(c, t));
    if (g == 0) {
      state[0] = acc.row_max[c], state[1] = acc.row_sum[c];
      if (VERIFY) state[2] = acc.shift[c];
    }
  }
}
