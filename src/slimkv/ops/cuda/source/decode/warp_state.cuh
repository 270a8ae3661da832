// The registers of a warp during the steps of a range.
#pragma once
#include "common/hopper.cuh"
#include "decode/levels.cuh"
#include "decode/queries.cuh"

constexpr int C = NG * OWN;  // columns of a lane
// Number c of a lane's columns in the block.
DEVICE int own_column(int c, int t) { return c / OWN * GROUP + OWN * t + c % OWN; }

// Narrow scores and their maximum are kept without the query's unit, which joins them inside the exponential. Wide ones
// get it where they are used.
constexpr bool LATE_UNIT = !SOFTCAP && !VERIFY, MAX_WITHOUT_UNIT = !WIDE && V_BYTES && LATE_UNIT;
// 8-bit values: probabilities are relative to the largest of a step, and the output is multiplied and added step by
// step. fp16 values: the output stays in the accumulators, and the maximum includes the values' scales.
constexpr bool OUT_IN_PRODUCTS = WIDE || !V_BYTES;

// With one unit for all columns, one multiplication by it and the token's scale turns products into scores, fused into
// the exponential.
constexpr bool TOKEN_UNITS = VERIFY && !SOFTCAP && K_KIND != UNIFORM;

// The running maximum is updated only when it lags by this many powers of two, so that the output is seldom rescaled.
constexpr float RESCALE_THRESHOLD = 8.0f;

// The shift of a column's scores before the cap, times log2(e).
DEVICE float score_shift(const DecodeArgs& args, const DecodeRange& range, int column) {
  const int query = range.chunk * args.queries_of_chunk + by_group(args, column),
            head = range.head * args.group_size + in_group(args, column);
  const bool valid = column < args.queries_of_chunk * args.group_size && query < range.s.queries;
  if (!valid || !args.score_shift) return 0.0f;
  return args.score_shift[(i64)(range.s.start + query) * args.num_kv_heads * args.group_size + head] * LOG2E;
}

// Constants of a lane's columns, and the tokens that all columns of the block see.
struct ColumnState {
  float unit[VERIFY ? 1 : C], sum[C], shift[C];  // SOFTCAP: of scores before the cap
  int clear_end, clear_begin;

  DEVICE_MEMBER float unit_of(int c) const { return unit[VERIFY ? 0 : c]; }

  DEVICE_MEMBER void load(const DecodeArgs& args, const DecodeRange& range, const u8* shared, int t) {
    const int first_query = range.chunk * args.queries_of_chunk;
    UNROLL_FOR (int c = 0; c < C; c++) {
      const Column column = *column_at(shared, own_column(c, t));
      float& u = unit[VERIFY ? 0 : c];
      u = column.unit * (args.scale < 0 ? -args.scale : args.scale);
      if (u < 1e-30f) u = 1e-30f;  // zero times minus infinity would not be a number
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
  u32 largest_fields;  // two at a time: 0xFFFF marks a token whose K or V was not a number

  DEVICE_MEMBER void clear() {
    largest_fields = 0;
    UNROLL_FOR (int c = 0; c < C; c++) row_max[c] = MINUS_INFINITY, row_sum[c] = 0, shift[c] = 0;
  }
};

// Scores of a step, then probabilities: of tokens g and g + 8 of each tile.
typedef float StepScores[C][SCORED_TILES][2];
