// Shared memory of a thread block of verify_warps.cu: LUT of keys | LUT of values | queries and probabilities of two
// steps, later the output | fields of two steps | column constants | maxima, sums and shifts of the warps | rescaling
// factors | scratch
#pragma once
static_assert(!BULK && NT == WARPS, "a step is a tile of every warp");

// The offset of a lane's words for MMA i of PRODUCTS and group n. Operands are in fragment order: a lane's two words
// are adjacent, and so are those of two groups.
template <int PRODUCTS> constexpr int fragment_offset(int n, int i, int lane) {
  return n / 2 * 2 + 1 < NG ? 512 * (n / 2 * PRODUCTS + i) + 16 * lane + n % 2 * 8
                            : 256 * (n * PRODUCTS + i) + 8 * lane;
}
constexpr int QUERY_BYTES = 256 * NG * QI, PROBABILITY_BYTES = 256 * NG * NT;
constexpr int QUERY_AT = LEVEL_BYTES, PROBABILITIES_AT = QUERY_AT + QUERY_BYTES;
constexpr int OPERANDS_END = PROBABILITIES_AT + 2 * PROBABILITY_BYTES;
// Rows are padded by 4 words to avoid bank conflicts.
constexpr int RESULT_ROW = 16 * OUT_SLICES + 4, RESULT_SUMS = 1,
              RESULTS_END = QUERY_AT + 4 * RESULT_ROW * COLUMNS * TEAM;
constexpr int SCRATCH_END = PROBABILITIES_AT + 4 * KD * WARPS; // to rotate queries, before there are probabilities
constexpr int PRODUCTS_END = RESULTS_END > OPERANDS_END ? RESULTS_END : OPERANDS_END;
constexpr int RINGS_AT = PRODUCTS_END > SCRATCH_END ? PRODUCTS_END : SCRATCH_END; // fields
constexpr int STEP_FIELDS = FIELDS * FIELD_STRIDE, COLUMN_AT = RINGS_AT + 2 * STEP_FIELDS;
constexpr int STATE_AT = COLUMN_AT + 16 * COLUMNS;
constexpr int FACTORS_AT = STATE_AT + 4 * STATE_WORDS * COLUMNS * WORKERS, FACTORS_END = FACTORS_AT + 4 * COLUMNS;
constexpr int OUTPUT_SCRATCH_AT = FACTORS_END, OUTPUT_SCRATCH_ROWS = WARPS;
constexpr int SHARED_BYTES = OUTPUT_TAKES_SCRATCH ? OUTPUT_SCRATCH_AT + WARPS * 4 * VD : FACTORS_END;
