// The rows of a warpgroup, before, between and after their tiles. Include it after the header of the products, whose
// attend_tiles it calls.
#pragma once
#include "prefill/lane_rows.cuh"

// Output, maximum and sum of rows, handed on from pass to pass (HANDS_ON): a lane's numbers lie a stride apart.
struct PassState {
  float* mine;
  i64 stride;

  DEVICE_MEMBER PassState(const PrefillArgs& args, int b)
      : mine(args.state + (i64)block_index() * 2 * ROWS + b * 128 * CONSUMERS + thread_index() - 128 * PRODUCERS),
        stride((i64)block_count() * 2 * ROWS) {}
  DEVICE_MEMBER void load(float (&o)[OUTPUTS], Softmax& softmax) const {
    UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[i] = mine[i * stride];
    UNROLL_FOR (int r = 0; r < 2; r++)
      softmax.row_max[r] = mine[(OUTPUTS + r) * stride], softmax.row_sum[r] = mine[(OUTPUTS + 2 + r) * stride];
  }
  DEVICE_MEMBER void store(const float (&o)[OUTPUTS], const Softmax& softmax) const {
    UNROLL_FOR (int i = 0; i < OUTPUTS; i++) mine[i * stride] = o[i] * softmax.output_factor();
    UNROLL_FOR (int r = 0; r < 2; r++)
      mine[(OUTPUTS + r) * stride] = softmax.row_max[r], mine[(OUTPUTS + 2 + r) * stride] = softmax.row_sum[r];
  }
};

// Block of rows b of a warpgroup is its share of the b-th CONSUMERS blocks, so that few rows leave the last blocks of
// all warpgroups empty.
DEVICE void attend_rows(const PrefillArgs& args, const Work& w, const Rings& rings, u8* operands, int warpgroup,
    int lane) {
  const int warp = thread_index() / 32 % 4;
  Visible visible[ROW_BLOCKS];
  Softmax softmax[ROW_BLOCKS];
  u8* const operand = operands + warpgroup * QUERY_BYTES;
  UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++) {
    const LaneRows rows =
        prepare_lane_rows(args, w, operand + b * CONSUMERS * QUERY_BYTES, b * CONSUMERS + warpgroup, warp, lane);
    visible[b] = rows.visible, softmax[b] = rows.softmax;
  }
  queries_are_written(warpgroup);

  float o[ROW_BLOCKS][OUTPUTS];
  UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++) {
    if (HANDS_ON && !args.first_pass) PassState(args, b).load(o[b], softmax[b]);
    else
      UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[b][i] = 0.0f;
  }
  const bool all =
      ROW_BLOCKS == 1 || (min_i32(w.s.queries, args.end_query) - w.first) * args.group_size > CONSUMERS * GROUP_ROWS;
  if (w.count > 0 && all)
    attend_tiles<ROW_BLOCKS>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);
  if (w.count > 0 && !all)
    attend_tiles<1>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);

  if (HANDS_ON && !args.last_pass) {
    UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++) PassState(args, b).store(o[b], softmax[b]);
    return;
  }
  UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++)
    if (b == 0 || all)
      store_lane_rows(args, w, softmax[b], o[b], operand + b * CONSUMERS * QUERY_BYTES, b * CONSUMERS + warpgroup,
          warpgroup, warp, lane);
}
