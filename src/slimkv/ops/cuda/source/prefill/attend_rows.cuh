// The query rows of a warpgroup: prologue, tiles, epilogue. Include it after the header with the products, whose
// softmax and attend_tiles it uses.
#pragma once
#include "prefill/rows.cuh"

// A lane's state of rows g and g + 8 of a row block.
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

// The accumulator index of a lane's output i in row r.
constexpr int output_of(int i, int r) { return 4 * (i / 2) + 2 * r + i % 2; }

// Normalises and stores the output row of a lane's quad. `row_sum`: of the lane; `scratch`: of the warp.
DEVICE void store_lane_row(const PrefillArgs& args, const Row& row, float (&x)[OWN], float row_max, float row_sum,
    u8* scratch, int lane) {
  float by = 1.0f;
  row_sum += shfl_xor(row_sum, 1);
  row_sum += shfl_xor(row_sum, 2);
  if (args.sinks && row.valid) by = add_sink(args.sinks[row.query * args.sink_stride + row.head], row_max, row_sum);
  by /= row_sum == 0.0f ? 1.0f : row_sum;
  if (V_ROTATED) by *= args.value_norm;
  UNROLL_FOR (int i = 0; i < OWN; i++) x[i] *= by;
  store_row(args, x, row.query * args.out_stride + row.head * args.out_head_stride, row.valid, scratch, lane);
  if (args.lse && (lane & 3) == 0 && row.valid)
    args.lse[row.query * args.num_kv_heads * args.group_size + row.head] = log_sum_exp(row_max, row_sum);
}

// Stores both output rows of a lane.
DEVICE void store_lane_rows(const PrefillArgs& args, const Work& w, const Softmax& softmax, const float (&o)[OUTPUTS],
    u8* operand, int row_block, int warpgroup, int warp, int lane) {
  if (!POWER_OF_TWO_D && HELD_QUERIES) sync_threads();  // rows pass through memory that all warps' tiles may use
  else if (!POWER_OF_TWO_D) bar_sync(1 + warpgroup, 128);  // or through that of the warpgroup's queries
#pragma unroll 1  // fetching code for the first time takes longer than running it
  for (int r = 0; r < 2; r++) {
    float x[OWN];
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = (r ? o[output_of(i, 1)] : o[output_of(i, 0)]) * softmax.output_factor();
    store_lane_row(args, row_of(args, w, row_block, 16 * warp + (lane >> 2) + 8 * r), x,
        r ? softmax.row_max[1] : softmax.row_max[0], r ? softmax.row_sum[1] : softmax.row_sum[0], operand + 2048 * warp,
        lane);
  }
}

// The state (output, maximum and sum) of rows, handed on between passes (HANDS_ON) or of a split. The lane is read
// anew, so that addresses occupy no registers between load and store.
struct PassState {
  static constexpr int STRIDE = 2 * ROWS, NEXT_BLOCK = (OUTPUTS + 4) * STRIDE;  // between a lane's numbers, and blocks
  float* mine;

  DEVICE_MEMBER PassState(const PrefillArgs& args, int block, int row_block)
      : mine(args.state + (i64)block * NEXT_BLOCK + 128 * row_block + (thread_index() & 96) + read_laneid()) {}
  DEVICE_MEMBER void load(float (&o)[OUTPUTS], Softmax& softmax) const {
    UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[i] = mine[i * STRIDE];
    UNROLL_FOR (int r = 0; r < 2; r++)
      softmax.row_max[r] = mine[(OUTPUTS + r) * STRIDE], softmax.row_sum[r] = mine[(OUTPUTS + 2 + r) * STRIDE];
  }
  DEVICE_MEMBER void store(const float (&o)[OUTPUTS], const Softmax& softmax) const {
    UNROLL_FOR (int i = 0; i < OUTPUTS; i++) mine[i * STRIDE] = o[i] * softmax.output_factor();
    UNROLL_FOR (int r = 0; r < 2; r++)
      mine[(OUTPUTS + r) * STRIDE] = softmax.row_max[r], mine[(OUTPUTS + 2 + r) * STRIDE] = softmax.row_sum[r];
  }
  // Merges row r of `splits` blocks from this one on.
  DEVICE_MEMBER void add_splits(int splits, int r, float (&x)[OWN], float& row_max, float& row_sum) const {
    const float *from = mine + 2 * r * STRIDE, *limits = mine + (OUTPUTS + r) * STRIDE;
    row_max = MINUS_INFINITY, row_sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < splits; k++) row_max = max_f32(row_max, limits[k * NEXT_BLOCK]);
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < splits; k++) {
      const float m = limits[k * NEXT_BLOCK], l = limits[k * NEXT_BLOCK + 2 * STRIDE];
      // A split without keys for the row counts only if it is NaN.
      const float factor = m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_approx(m - row_max);
      row_sum = fma_rn(l, factor, row_sum);
      UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = fma_rn(from[output_of(i, 0) * STRIDE + k * NEXT_BLOCK], factor, x[i]);
    }
  }
};

// Attention for the rows of a warpgroup. Its row block b is row block CONSUMERS b + warpgroup of the thread block, so
// with few rows, the last row blocks of all warpgroups are empty.
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
  griddepcontrol_wait();  // for the state

  float o[ROW_BLOCKS][OUTPUTS];
  UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++) {
    if (HANDS_ON && !args.first_pass) PassState(args, block_index(), b * CONSUMERS + warpgroup).load(o[b], softmax[b]);
    else
      UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[b][i] = 0.0f;
  }
  const bool all = ROW_BLOCKS == 1 || rows_of(args, w) > (CONSUMERS + (FUSED ? warpgroup : 0)) * GROUP_ROWS;
  if (w.count > 0 && all)
    attend_tiles<ROW_BLOCKS>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);
  if (w.count > 0 && !all)
    attend_tiles<1>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);

  if ((HANDS_ON && !args.last_pass) || (FUSED && w.splits > 1)) {
    UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++)
      PassState(args, block_index(), b * CONSUMERS + warpgroup).store(o[b], softmax[b]);
    return;
  }
  UNROLL_FOR (int b = 0; b < ROW_BLOCKS; b++)
    if (b == 0 || all)
      store_lane_rows(args, w, softmax[b], o[b], operand + b * CONSUMERS * QUERY_BYTES, b * CONSUMERS + warpgroup,
          warpgroup, warp, lane);
}
