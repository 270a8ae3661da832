// The rows of a warpgroup, before, between and after their tiles. Include it after the header of the products, whose
// softmax and attend_tiles it uses.
#pragma once
#include "prefill/rows.cuh"

// A lane's state of rows g and g + 8 of a block of 64.
struct LaneRows {
  Visible visible;
  Softmax softmax;
};

DEVICE LaneRows prepare_lane_rows(const PrefillArgs& args, const Work& w, u8* operand, int row_block, int warp,
    int lane) {
  const int g = lane >> 2, t = lane & 3;
  LaneRows lane_rows;
  bool valid[2];
  i64 from[2];
  UNROLL_FOR (int r = 0; r < 2; r++) {
    const Row row = row_of(args, w, row_block, 16 * warp + g + 8 * r);
    const int position = w.s.length - w.s.queries + row.of_sequence;
    lane_rows.visible.end[r] = args.causal ? min_i32(w.s.length, position + 1) : w.s.length;
    lane_rows.visible.begin[r] = WINDOW ? position - args.sliding_window + 1 : 0;
    lane_rows.softmax.row_max[r] = MINUS_INFINITY, lane_rows.softmax.row_sum[r] = 0.0f;
    if (SCORE_SHIFT) {
      const i64 at = row.query * args.num_kv_heads * args.group_size + row.head;
      lane_rows.softmax.shift[r] = row.valid ? args.score_shift[at] * LOG2E * cap_factor(args.softcap) : 0.0f;
    }
    valid[r] = row.valid, from[r] = row.query * args.query_stride + row.head * args.query_head_stride;
  }
  prepare_rows(args, valid, from, operand, 16 * warp + g, t, lane_rows.softmax.factor, lane_rows.softmax.row_sum);
  return lane_rows;
}

// Rows of output that a lane's quad has, of products that have ended.
DEVICE void store_lane_rows(const PrefillArgs& args, const Work& w, const Softmax& softmax, const float (&o)[OUTPUTS],
    u8* operand, int row_block, int warpgroup, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  UNROLL_FOR (int r = 0; r < 2; r++) {
    const Row row = row_of(args, w, row_block, 16 * warp + g + 8 * r);
    float row_sum = softmax.row_sum[r], row_max = softmax.row_max[r], by = 1.0f;
    row_sum += shfl_xor(row_sum, 1);
    row_sum += shfl_xor(row_sum, 2);
    if (args.sinks && row.valid) by = add_sink(args.sinks[row.query * args.sink_stride + row.head], row_max, row_sum);
    by /= row_sum == 0.0f ? 1.0f : row_sum;
    if (V_ROTATED) by *= args.value_norm;
    by *= softmax.output_factor();
    float x[OWN];
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = o[4 * (i / 2) + 2 * r + i % 2] * by;
    if (!POWER_OF_TWO_D && r == 0)
      bar_sync(1 + warpgroup, 128);  // nobody needs queries any more, whose place rows go through
    store_row(args, x, row.query * args.out_stride + row.head * args.out_head_stride, row.valid, operand + 2048 * warp,
        lane);
    if (args.lse && t == 0 && row.valid)
      args.lse[row.query * args.num_kv_heads * args.group_size + row.head] = log_sum_exp(row_max, row_sum);
  }
}

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
  const bool all = ROW_BLOCKS == 1 || (w.s.queries - w.first) * args.group_size > CONSUMERS * GROUP_ROWS;
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
