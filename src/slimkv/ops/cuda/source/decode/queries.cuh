// Queries from global memory to operands: rotated, scaled by their largest coordinate, split into bytes or halves.
#pragma once
#include "common/rotation.cuh"
#include "decode/schedule.cuh"

constexpr int QN = (KD + 31) / 32;

// Loads the query of column c of a range: y[i] is dimension lane + 32 i. A negative softmax scale negates the query.
DEVICE void load_query(const DecodeArgs& args, const DecodeRange& range, int c, float (&y)[QN], int lane) {
  const int query = range.chunk * args.queries_of_chunk + by_group(args, c),
            head = range.head * args.group_size + in_group(args, c);
  const bool valid = c < args.queries_of_chunk * args.group_size && query < range.s.queries;
  const i64 at = (i64)(range.s.start + query) * args.query_stride + (i64)head * args.query_head_stride;
  UNROLL_FOR (int i = 0; i < QN; i++) {
    const int d = lane + 32 * i;
    y[i] = valid && d < KD ? load_number(args.query, at + d, Q_TYPE) : 0.0f;
    if (args.scale < 0) y[i] = -y[i];
  }
}

// The offset of word `word` of a row in the query operand: a lane's two words of an MMA are adjacent.
DEVICE int operand_offset(int row, int word) {
#if VERIFY && !WARPGROUPS
  return fragment_offset<QI>(row / 8, word / 8, 4 * (row % 8) + word % 4) + word % 8 / 4 * 4;
#endif
  return 8 * (32 * (row / 8 * QI + word / 8) + 4 * (row % 8) + word % 4) + word % 8 / 4 * 4;
}
constexpr int NEXT_ROW = 32; // bytes
// The offset of number `number` of a row in a wgmma operand, which has rows of 64 numbers (128 bytes).
DEVICE int operand_place(int row, int number) {
  return number / 64 * 128 * COLUMNS + 128 * row + ((number % 64 / 8 ^ (row & 7)) << 4) + 2 * (number % 8);
}

// The constants of a column: the factor from its products to scores (without the softmax scale), the sum of its query's
// coordinates, and the visible tokens.
struct Column {
  float unit, sum;
  int visible_begin, visible_end;
};
DEVICE Column* column_at(u8* shared, int c) { return (Column*)(shared + COLUMN_AT) + c; }
DEVICE const Column* column_at(const u8* shared, int c) { return (const Column*)(shared + COLUMN_AT) + c; }

// One warp: rotates a query. Returns its largest magnitude, or infinity if a number is not finite.
DEVICE float rotate_query(const DecodeArgs& args, float (&y)[QN], float* scratch, int lane) {
  if (K_ROTATED)
    rotate<KD, K_ROTATED ? K_CORE : 1>(y, args.key_sign_bits, args.key_core, (const u16*)args.key_signs, args.key_norm,
        scratch, lane);
  float row_max = 0.0f;
  bool finite = true;
  UNROLL_FOR (int i = 0; i < QN; i++) {
    const float a = y[i] < 0 ? -y[i] : y[i];
    finite = finite && a < as_float(0x7F800000u);
    row_max = max_f32(row_max, a);
  }
  UNROLL_FOR (int d = 16; d; d >>= 1) row_max = max_f32(row_max, shfl_xor(row_max, d));
  return warp_any(!finite) ? as_float(0x7F800000u) : row_max;
}

// Writes a coordinate as two signed bytes; returns the integer that they represent.
DEVICE i32 write_bytes(float x, u8* to) {
  const i32 n = (i32)as_bits(x + 12582912.0f) - 0x4B400000, high = (n + 64) >> 7;
  to[0] = (u8)high;
  to[NEXT_ROW] = (u8)(n - 128 * high);
  return n;
}

// One warp: writes the rotated query of column c to `operands` in operand order, and its constants to `shared`. All
// coordinates are divided by `row_max`: the column's own or, for VERIFY, the largest of all columns. Columns with much
// smaller queries lose precision, but too little to affect their scores noticeably.
DEVICE void write_query(const DecodeArgs& args, const DecodeRange& range, int c, const float (&y)[QN], float row_max,
    bool finite, u8* shared, u8* operands, int lane) {
  const float largest = K_BYTES ? 16256.0f : VERIFY ? 32768.0f : 1.0f; // 127 * 128: what two signed bytes hold
  const float up = row_max > 1e-30f && finite ? largest / row_max : 0.0f;
  const int row = c / GROUP * 8 + (WIDE ? c % GROUP : 2 * (c % GROUP));
  float sum = 0.0f;
  UNROLL_FOR (int i = 0; i < QN; i++) {
    const int d = lane + 32 * i;
    if (d >= KD) continue;
    const float x = finite ? mul_rn(y[i], up) : 0.0f;
    if (K_BYTES) {
      const int in_slice = d % 16, word = d / 16 * 4 + in_slice % 8 / 2, byte = (in_slice & 1) + 2 * (in_slice / 8);
      sum += (float)write_bytes(x, operands + operand_offset(row, word) + byte);
    } else {
      const u32 high = VERIFY && !finite ? 0x7E00u : f32_to_f16(x);
      // A lane's pairs are dimensions 8 apart, as in `code_halves`, or adjacent, as in `pair_halves`.
      const int in_slice = d % 16, place = K_IN_PAIRS ? in_slice : 8 * (in_slice & 1) + (in_slice & 6) + in_slice / 8;
      u16* to = (u16*)(operands +
          (WARPGROUPS ? operand_place(row, d / 16 * 16 + place)
                      : operand_offset(row, d / 16 * 8 + place / 2) + 2 * (place % 2)));
      to[0] = (u16)high;
      sum += f16_to_f32(high);
      if (!WIDE) to[NEXT_ROW / 2] = (u16)f32_to_f16(x - f16_to_f32(high));
    }
  }
  UNROLL_FOR (int d = 16; d; d >>= 1) sum += shfl_xor(sum, d);
  if (lane == 0) {
    const int position = range.s.length - range.s.queries + range.chunk * args.queries_of_chunk + by_group(args, c);
    *column_at(shared, c) = {finite || VERIFY ? row_max / largest * KEY_UNIT : NOT_A_NUMBER, sum,
        WINDOW ? position - args.sliding_window + 1 : 0,
        args.causal ? min_i32(range.s.length, position + 1) : range.s.length};
  }
}

DEVICE void prepare_query(const DecodeArgs& args, const DecodeRange& range, int c, float (&y)[QN], u8* shared,
    u8* operands, float* scratch, int lane) {
  const float row_max = rotate_query(args, y, scratch, lane);
  write_query(args, range, c, y, row_max, row_max < as_float(0x7F800000u), shared, operands, lane);
}
