// Shared memory of a thread block of decode.cu: LUT of keys | LUT of values | rings | queries | column constants |
// maxima and sums of the warps | barriers of the rings' slots | scratch
#pragma once

constexpr int QUERY_BYTES = 256 * NG * QI;
constexpr bool Q_IN_SHARED = NG * QI > 16;  // the output needs the registers
constexpr int RINGS_AT = LEVEL_BYTES, RINGS_END = RINGS_AT + RINGS * STAGES * SLOT;
constexpr int QUERY_AT = RINGS_END, COLUMN_AT = QUERY_AT + QUERY_BYTES;
constexpr int STATE_AT = COLUMN_AT + 16 * COLUMNS;
constexpr int BARRIERS_AT = STATE_AT + 4 * STATE_WORDS * COLUMNS * WORKERS;
constexpr int BARRIERS_END = BARRIERS_AT + (BULK ? 8 * RINGS * BARRIERS : 0);
// Queries are rotated in the ring's free slot, or, with a single one, in memory of their own.
constexpr bool OWN_SCRATCH = STAGES == 1 && QUERIES_TAKE_SCRATCH;
constexpr int SCRATCH_AT = (BARRIERS_END + 15) / 16 * 16, SCRATCH_ROWS = COLUMNS < WARPS ? COLUMNS : WARPS;
constexpr int SHARED_BYTES = OWN_SCRATCH ? SCRATCH_AT + SCRATCH_ROWS * 4 * KD : BARRIERS_END;
// The memory of the queries is reused to rotate output rows back, by one warp for each row that fits.
constexpr int OUTPUT_SCRATCH_AT = QUERY_AT, OUTPUT_SCRATCH_ROWS = QUERY_BYTES / (4 * VD);
