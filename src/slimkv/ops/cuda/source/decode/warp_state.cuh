// The softmax state of a warp in registers.
#pragma once
#include "common/hopper.cuh"
#include "decode/levels.cuh"
#include "decode/queries.cuh"

constexpr int C = NG * OWN;  // columns of a lane
// The column in the thread block of a lane's column c.
DEVICE int own_column(int c, int t) { return c / OWN * GROUP + OWN * t + c % OWN; }

// LATE_UNIT: scores exclude the query's unit, which is applied inside the exponential. MAX_WITHOUT_UNIT: so does the
// running maximum.
constexpr bool LATE_UNIT = !SOFTCAP && !VERIFY, MAX_WITHOUT_UNIT = !WIDE && V_BYTES && LATE_UNIT;
// Byte values: probabilities are relative to the largest of a step, and each step's product is scaled and added to the
// output. fp16 values: the output stays in the MMA accumulators, and the running maximum includes the values' scales.
constexpr bool OUT_IN_PRODUCTS = WIDE || !V_BYTES;

// All columns share one unit: a factor per token (unit x key scale) in the exponential turns products into scores.
constexpr bool TOKEN_UNITS = VERIFY && !SOFTCAP && K_KIND != UNIFORM;

// The running maximum is updated only if it lags by this many powers of two, so that the output is seldom rescaled.
constexpr float RESCALE_THRESHOLD = 8.0f;

// The shift of a column's scores before the cap, times log2(e).
DEVICE float score_shift(const DecodeArgs& args, const DecodeRange& range, int column) {
  const int query = range.chunk * args.queries_of_chunk + by_group(args, column),
            head = range.head * args.group_size + in_group(args, column);
  const bool valid = column < args.queries_of_chunk * args.group_size && query < range.s.queries;
  if (!valid || !args.score_shift) return 0.0f;
  return args.score_shift[(i64)(range.s.start + query) * args.num_kv_heads * args.group_size + head] * LOG2E;
}

// Constants of a lane's columns, and the range of tokens that all columns of the thread block see.
struct ColumnState {
  float unit[VERIFY ? 1 : C], sum[C], shift[C];  // shift: SOFTCAP, added to scores before the cap
  int clear_end, clear_begin;

  DEVICE_MEMBER float unit_of(int c) const { return unit[VERIFY ? 0 : c]; }

  DEVICE_MEMBER void load(const DecodeArgs& args, const DecodeRange& range, const u8* shared, int t) {
    const int first_query = range.chunk * args.queries_of_chunk;
    UNROLL_FOR (int c = 0; c < C; c++) {
      const Column column = *column_at(shared, own_column(c, t));
      float& u = unit[VERIFY ? 0 : c];
      u = column.unit * (args.scale < 0 ? -args.scale : args.scale);
      if (u < 1e-30f) u = 1e-30f;  // zero times minus infinity would be NaN
      sum[c] = column.sum;
      shift[c] = SOFTCAP ? score_shift(args, range, own_column(c, t)) : 0.0f;
    }
    const int last_query = min_i32(range.s.queries, first_query + args.queries_of_chunk) - 1;
    clear_end = args.causal ? range.s.length - range.s.queries + first_query + 1 : range.s.length;
    clear_begin = WINDOW ? range.s.length - range.s.queries + last_query - args.sliding_window + 1 : 0;
  }
};

// The running softmax of a lane's columns.
struct RunningSoftmax {
  float row_max[C], row_sum[C], shift[C];
  u32 largest_fields;  // two at a time; 0xFFFF marks a token whose K or V is NaN

  DEVICE_MEMBER void clear() {
    largest_fields = 0;
    UNROLL_FOR (int c = 0; c < C; c++) row_max[c] = MINUS_INFINITY, row_sum[c] = 0, shift[c] = 0;
  }
};

// Scores, later probabilities, of a step: for tokens g and g + 8 of each tile.
typedef float StepScores[C][SCORED_TILES][2];
