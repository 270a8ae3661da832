// Queries from global memory to operands, once for a block: scaled by a power of two into halves (bfloat16 beside a rope part
// that is), 16 dimensions side by side.
#pragma once
#include "common/rotation.cuh"
#include "latent/codes.cuh"
#include "latent_split/shape.cuh"

// Numbers lane, lane + 32, ... of a row to its operand at `to`; what the operand is to be multiplied by. `sum`: of the operand.
template <int DIM, bool PERMUTED, bool BF16>
DEVICE float stage_row(const float (&x)[DIM / 32], int exponent, u8* to, int n, int lane, float& sum) {
  const float down = BF16 ? 1.0f : as_float((u32)(254 - exponent) << 23);
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
  return BF16 ? 1.0f : as_float((u32)exponent << 23);
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
  if (R_ROTATED) rotate<RD, 1>(y, args.rope_sign_bits, nullptr, nullptr, args.rope_norm, nullptr, lane);
  // What is 2^40 times smaller than the rope part of the query makes no difference, and one unit fits in the other's range.
  const int rope_exponent = exponent_of_row<RD, 1>(y), exponent = max_i32(exponent_of_row<LD, 1>(x), rope_exponent - 40);
  const float latent = stage_row<LD, true, false>(x, exponent, shared + QUERIES_AT, n, lane, sum) * L_UNIT;
  const float rope = stage_row<RD, false, R_KIND == RAW && R_BF16>(y, rope_exponent, shared + ROPE_AT, n, lane, rope_sum) * R_UNIT;
  if (lane == 0)
    ((Column*)(shared + COLUMNS_AT))[n] = {-OFFSET * sum, rope / latent, latent * args.scale, real ? rows.visible_end(args, n) : 0};
}
