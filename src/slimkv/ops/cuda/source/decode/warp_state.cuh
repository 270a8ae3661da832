// What a warp keeps in registers while it goes through the steps of a range.
#pragma once
#include "common/hopper.cuh"
#include "decode/queries.cuh"

constexpr int C = NG * OWN;  // columns of a lane
// Number c of a lane's columns in the block.
DEVICE int own_column(int c, int t) { return c / OWN * GROUP + OWN * t + c % OWN; }

// Narrow scores and their maximum are kept without the query's unit, which joins them inside the exponential. Wide ones
// get it where they are used.
constexpr bool LATE_UNIT = !SOFTCAP && !ONE_UNIT, MAX_WITHOUT_UNIT = !WIDE && V_BYTES && LATE_UNIT;
// Values as bytes: probabilities are relative to the largest of a step, and the output is multiplied and added step by step. Values
// as halves: the output stays in the products' accumulators, and the maximum counts the values' scales.
constexpr bool OUT_IN_PRODUCTS = WIDE || !V_BYTES;
constexpr bool V_AS_STORED = !WIDE && V_IN_PAIRS;
// Of 2 bits, narrow: rows of the last slice's products are dimensions 2 g and 2 g + 1, as they lie in its token rows.
constexpr bool V_PAIRED_TAIL = V_BYTES && V_REGROUPED && V_KIND == LLOYD && V_BITS == 2 && VS % 2 == 1 && VS > 1 && NT % 2 == 0;
DEVICE int dimension_of(int i, int g, int r) { return V_PAIRED_TAIL && i == VS - 1 ? 16 * i + 2 * g + r : 16 * i + g + 8 * r; }
constexpr int OUT_NUMBERS = OUT_IN_PRODUCTS ? 4 : 2;

// With one unit, a token's scale and that make products scores in one multiplication, which joins them inside the exponential.
constexpr bool TOKEN_UNITS = ONE_UNIT && !SOFTCAP && K_KIND != UNIFORM;

// The maximum that exponents are taken from follows only when it has fallen behind by so many powers of two: then output is
// seldom rescaled.
constexpr float RESCALE_THRESHOLD = 8.0f;

// Narrow bytes: exponents are raised, so that exponentials can be multiplied by fields as they are, and the maximum follows one that is so
// high.
constexpr float RAISED_BY = 16.0f, RAISED = 65536.0f, MOST_RAISED = RAISED_BY + 24.0f;

// Of a warpgroup, with as many columns.
typedef WgmmaNarrow<8 * NG, false> WarpgroupProduct;

// How codes become levels.
struct LevelTables {
  Table key, value;  // in registers
  LevelTable key_levels, value_levels;
};

// The queries' operands, unless they stay in shared memory.
struct QueryOperands {
  u32 q[NG][Q_IN_SHARED || WGMMA ? 1 : QI][2];

  DEVICE_MEMBER void load(const u8* operands, int lane) {
    if (!Q_IN_SHARED && !WGMMA)
#pragma unroll
      for (int n = 0; n < NG; n++)
#pragma unroll
        for (int i = 0; i < QI; i++) load_operand(operands, n, i, lane, q[n][WGMMA ? 0 : i]);
  }
  DEVICE_MEMBER void load_product(const u8* shared, int i, int lane) {
    if (Q_IN_SHARED)
#pragma unroll
      for (int n = 0; n < NG; n++) load_operand(shared + QUERY_AT, n, i, lane, q[n][0]);
  }
};

// What every step needs of a lane's columns, and which tokens all columns of the block see.
struct ColumnState {
  float unit[ONE_UNIT ? 1 : C], sum[C], slack[C];
  int clear_end, clear_begin;

  DEVICE_MEMBER float unit_of(int c) const { return unit[ONE_UNIT ? 0 : c]; }

  DEVICE_MEMBER void load(const DecodeArgs& args, const WorkRange& range, const u8* shared, int t) {
    const int first_query = range.chunk * args.queries_of_chunk;
#pragma unroll
    for (int c = 0; c < C; c++) {
      const Column column = *column_at(shared, own_column(c, t));
      float& u = unit[ONE_UNIT ? 0 : c];
      u = column.unit * (args.scale < 0 ? -args.scale : args.scale);
      if (u < 1e-30f) u = 1e-30f;  // zero times minus infinity would not be a number
      sum[c] = column.sum;
      slack[c] = MAX_WITHOUT_UNIT ? RESCALE_THRESHOLD / u : RESCALE_THRESHOLD;
    }
    const int last_query = min_i32(range.s.queries, first_query + args.queries_of_chunk) - 1;
    clear_end = args.causal ? range.s.length - range.s.queries + first_query + 1 : range.s.length;
    clear_begin = WINDOW ? range.s.length - range.s.queries + last_query - args.sliding_window + 1 : 0;
  }
};

// The running softmax. Of bytes out[n][i][r] is dimension 16 i + g + 8 r of column n. Wide: out[n][i][2 r + j], column
// 8 n + 2 t + j. In a team, of the slices from OUT_SLICES times the warp's place on. Narrow halves: the sum of out[n][i][2 r] and
// out[n][i][2 r + 1], or, of values as they are stored, dimensions g of slices i and i + 1 in out[n][i] and g + 8 in out[n][i + 1].
struct Accumulator {
  static constexpr int SLICES = V_AS_STORED ? (OUT_SLICES + 1) / 2 * 2 : OUT_SLICES;
  float out[WGMMA ? SLICES : NG][WGMMA ? NG : SLICES][OUT_NUMBERS], row_max[C], row_sum[C], shift[C];
  u32 largest_fields;  // two at a time: 0xFFFF marks a token whose K or V was not a number

  DEVICE_MEMBER float (&numbers(int n, int i))[OUT_NUMBERS] { return out[WGMMA ? i : n][WGMMA ? n : i]; }
  DEVICE_MEMBER const float (&numbers(int n, int i) const)[OUT_NUMBERS] { return out[WGMMA ? i : n][WGMMA ? n : i]; }
  // Of all groups: what a product of the warpgroup adds to.
  DEVICE_MEMBER float (&products(int i))[4 * NG] { return *(float(*)[4 * NG])&out[i]; }

  // Dimension 16 i + g + 8 r of the lane's column OWN n + j.
  DEVICE_MEMBER float number(int n, int i, int r, int j) const {
    if (!OUT_IN_PRODUCTS) return numbers(n, i)[r];
    if (WIDE) return numbers(n, i)[(2 * r + j) % OUT_NUMBERS];
    const float(&pair)[OUT_NUMBERS] = numbers(n, V_AS_STORED ? i / 2 * 2 + r : i);
    const int at = 2 * (V_AS_STORED ? i % 2 : r) % OUT_NUMBERS;
    return pair[at] + pair[at + 1];
  }

  DEVICE_MEMBER void clear() {
    largest_fields = 0;
#pragma unroll
    for (int c = 0; c < C; c++) row_max[c] = MINUS_INFINITY, row_sum[c] = 0, shift[c] = 0;
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int j = 0; j < OUT_NUMBERS; j++) numbers(n, i)[j] = 0;
  }
};

// The place of a warp among those that share values.
struct Team {
  int number, member;
  DEVICE_MEMBER void sync() const { if (TEAM > 1) sync_team(1 + number, 32 * TEAM); }
  DEVICE_MEMBER bool any(bool p) const { return TEAM > 1 ? team_any(p, 1 + number, 32 * TEAM) : warp_any(p); }
};

// Of pairs, what a lane's tokens have in common for all columns: what multiplies their scores (with TOKEN_UNITS), their values'
// scales, and the largest of some fields of the warp, two at a time.
struct TokenFields {
  float unit[SCORED_TILES][2], scale[SCORED_TILES][2];
  u32 largest;
};
// Scores of a step, then probabilities: of tokens g and g + 8 of each tile.
typedef float StepScores[C][SCORED_TILES][2];
// Fields of a warp's own tile x behind those of its first one.
DEVICE int fields_behind(int x) { return fields_of(TILES_APART * x) - FIELDS_AT; }
// A warp's references of the softmax, from the first of the columns of lanes t on.
DEVICE float* references_of(u8* shared, int worker, int t) { return (float*)(shared + REFERENCES_AT) + worker * COLUMNS + OWN * t; }
