// Queries from global memory to operands, once for a block: scaled by a power of two into halves (bfloat16 beside a rope part
// that is), 16 dimensions side by side.
#pragma once
#include "common/rotation.cuh"
#include "latent/shape.cuh"

// Numbers lane, lane + 32, ... of a row to its operand at `to`; what the operand is to be multiplied by. `sum`: of the operand.
template <int DIM, bool PERMUTED, bool BF16>
DEVICE float stage_row(const float (&x)[DIM / 32], u8* to, int n, int lane, float& sum) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
#pragma unroll
  for (int d = 16; d; d >>= 1) most = max_f32(most, shfl_xor(most, d));
  const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(most) >> 23), 1), 253);
  const float down = BF16 ? 1.0f : as_float((254 - exponent) << 23);
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; i++) {
    const int d = lane + 32 * i, at = PERMUTED ? place_of(d) : d;
    const u32 bits = BF16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i] * down);
    *(u16*)(to + at / 64 * ROWS * 128 + n * 128 + ((at % 64 / 8 ^ (n & 7)) << 4) + at % 8 * 2) = (u16)bits;
    sum += BF16 ? as_float(bits << 16) : f16_to_f32(bits);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += shfl_xor(sum, d);
  return BF16 ? 1.0f : as_float(exponent << 23);
}

// Row n of a block, by one warp. Rows beyond the last are zeros and see nothing.
DEVICE void stage_query(const LatentArgs& args, const Rows& rows, int n, u8* shared, int lane) {
  const bool real = n < rows.count;
  const i64 query = rows.start + (rows.first + n) / args.heads, head = (rows.first + n) % args.heads;
  float x[LD / 32], y[RD / 32], sum, rope_sum;
#pragma unroll
  for (int i = 0; i < LD / 32; i++)
    x[i] = real ? load_number(args.query, query * args.query_stride + head * args.query_head_stride + lane + 32 * i, Q_TYPE) : 0.0f;
#pragma unroll
  for (int i = 0; i < RD / 32; i++)
    y[i] = real ? load_number(args.rope, query * args.rope_stride + head * args.rope_head_stride + lane + 32 * i, ROPE_TYPE) : 0.0f;
  if (R_ROTATED) rotate<RD, 1>(y, args.rope_sign_bits, nullptr, args.rope_norm, nullptr, lane);
  const float latent = stage_row<LD, true, false>(x, shared + QUERIES_AT, n, lane, sum);
  const float rope = stage_row<RD, false, R_KIND == RAW && R_BF16>(y, shared + ROPE_AT, n, lane, rope_sum);
  if (lane == 0)
    ((Column*)(shared + COLUMNS_AT))[n] = {-OFFSET * sum, latent * args.scale * L_UNIT, rope * args.scale * R_UNIT,
                                           real ? rows.visible_end(args, n) : 0};
}
