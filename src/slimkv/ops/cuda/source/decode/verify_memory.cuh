// Shared memory of a thread block of verify.cu: LUT of keys | LUT of values | queries | probabilities of two steps of
// every pair | rings | column constants | maxima, sums and shifts of the warps | rescaling factors | barriers of the
// rings' slots | barriers of the probabilities | cursors | scratch
#pragma once
static_assert(BULK && WARPS % 8 == 0 && NT % 4 == 0, "a step is as many tiles of every warp");

// Operands have the layout of smem_descriptor: a row of 64 numbers per column, and a further operand per 64 numbers.
constexpr int OPERAND_BYTES = 128 * COLUMNS;
constexpr int QUERY_BYTES = OPERAND_BYTES * ((KD + 63) / 64);
constexpr int QUERY_AT = LEVEL_BYTES;
static_assert(QUERY_AT % 1024 == 0, "rows are exchanged within 1024 bytes");
constexpr int PROBABILITIES_AT = QUERY_AT + QUERY_BYTES;
constexpr int OPERANDS_END = PROBABILITIES_AT + WORKERS / 2 * OWN_TILES * OPERAND_BYTES;
// Results reuse the memory of queries and probabilities, for all pairs at once or one after the other. Rows are padded
// by 4 words to avoid bank conflicts.
constexpr int RESULT_ROW = 16 * OUT_SLICES + 4, PAIR_RESULT_BYTES = 4 * RESULT_ROW * COLUMNS * TEAM;
constexpr int RESULT_SUMS = RINGS * PAIR_RESULT_BYTES <= OPERANDS_END - QUERY_AT ? RINGS : 1;
constexpr int RINGS_AT = QUERY_AT + PAIR_RESULT_BYTES > OPERANDS_END ? QUERY_AT + PAIR_RESULT_BYTES : OPERANDS_END;
constexpr int COLUMN_AT = RINGS_AT + RINGS * STAGES * SLOT;
constexpr int STATE_AT = COLUMN_AT + 16 * COLUMNS;
constexpr int FACTORS_AT = STATE_AT + 4 * STATE_WORDS * COLUMNS * WORKERS;  // of two steps (PairMemory)
constexpr int BARRIERS_AT = FACTORS_AT + RINGS * 2 * (4 * COLUMNS + 8);
constexpr int PAIR_BARRIERS_AT = BARRIERS_AT + 8 * RINGS * BARRIERS;  // probabilities of two steps: published, used
constexpr int PAIR_BARRIERS_END = PAIR_BARRIERS_AT + RINGS * 4 * 8;
constexpr int CURSORS_AT = (PAIR_BARRIERS_END + 15) / 16 * 16, CURSOR_BYTES = 48;  // of the value warps
constexpr int OUTPUT_SCRATCH_AT = CURSORS_AT + CURSOR_BYTES * WORKERS, OUTPUT_SCRATCH_ROWS = WARPS;
constexpr int SHARED_BYTES = OUTPUT_SCRATCH_AT + (OUTPUT_TAKES_SCRATCH ? WARPS * 4 * VD : 0);
