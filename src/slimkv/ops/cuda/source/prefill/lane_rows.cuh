// A lane's two rows of a block of 64, before and after their tiles. Include it after the header of the arithmetic
// (sixteen_bit.cuh, eight_bit.cuh), whose softmax it uses.
#pragma once
#include "prefill/rows.cuh"

// What a lane has to know of its rows g and g + 8 of a block of them.
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
    if (args.sinks && row.valid) {
      const float sink = args.sinks[row.query * args.sink_stride + row.head] * LOG2E, higher = max_f32(row_max, sink);
      by = exp2_approx(row_max - higher);
      row_sum = row_sum * by + exp2_approx(sink - higher);
      row_max = higher;
    }
    const bool empty = row_sum == 0.0f;
    by /= empty ? 1.0f : row_sum;
    if (V_ROTATED) by *= args.value_norm;
    by *= softmax.output_factor();
    float x[OWN];
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = o[4 * (i / 2) + 2 * r + i % 2] * by;
    if (!POWER_OF_TWO_D && r == 0)
      bar_sync(1 + warpgroup, 128);  // nobody needs queries any more, whose place rows go through
    store_row(args, x, row.query * args.out_stride + row.head * args.out_head_stride, row.valid, operand + 2048 * warp,
        lane);
    if (args.lse && t == 0 && row.valid)
      args.lse[row.query * args.num_kv_heads * args.group_size + row.head] =
          empty ? MINUS_INFINITY : (row_max + log2_approx(row_sum)) * LN2;
  }
}
