// A row of queries from global memory to operands: halves scaled by a power of two (bfloat16 beside a rope part that is).
#pragma once
#include "common/rotation.cuh"
#include "latent/codes.cuh"
#include "latent/schedule.cuh"

constexpr int LEAST = 60;  // exponent: what is smaller than 2^-67 counts as that

// Row n of an item, by one warp; rows beyond the last are zeros.
struct Query {
  float x[LD / 32], y[RD / 32];  // numbers lane, lane + 32, ...
  int exponent, rope_exponent, lane;
  bool real;

  DEVICE_MEMBER Query(const LatentArgs& args, const Item& item, int n, int lane_) : lane(lane_), real(n < item.count) {
    const i64 query = item.start + (item.first + n) / args.heads, head = (item.first + n) % args.heads;
    const i64 at = query * args.query_stride + head * args.query_head_stride + lane;
    const i64 rope_at = query * args.rope_stride + head * args.rope_head_stride + lane;
#pragma unroll
    for (int i = 0; i < LD / 32; i++) x[i] = real ? load_number(args.query, at + 32 * i, Q_TYPE) : 0.0f;
#pragma unroll
    for (int i = 0; i < RD / 32; i++) y[i] = real ? load_number(args.rope, rope_at + 32 * i, ROPE_TYPE) : 0.0f;
    if (R_ROTATED) rotate<RD, 1>(y, args.rope_sign_bits, nullptr, args.rope_norm, nullptr, lane);
    // What is 2^40 times smaller than the rope part of the query makes no difference, and one unit fits in the other's range.
    rope_exponent = exponent_of_row<RD, LEAST>(y), exponent = max_i32(exponent_of_row<LD, LEAST>(x), rope_exponent - 40);
  }
  // What operands are to be multiplied by.
  DEVICE_MEMBER float latent_unit() const { return as_float((u32)exponent << 23) * L_UNIT; }
  DEVICE_MEMBER float rope_unit() const { return BF16_ROPE ? R_UNIT : as_float((u32)rope_exponent << 23) * R_UNIT; }
  // Calls put(column, bits).
  template <class F> DEVICE_MEMBER void latent_operand(const F& put) const {
    const float down = as_float((u32)(254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < LD / 32; i++) put(place_of(lane + 32 * i), f32_to_f16(x[i] * down));
  }
  // `by`: what bfloat16 is multiplied by, a power of two.
  template <class F> DEVICE_MEMBER void rope_operand(const F& put, float by = 1.0f) const {
    const float down = as_float((u32)(254 - rope_exponent) << 23);
#pragma unroll
    for (int i = 0; i < RD / 32; i++) put(lane + 32 * i, BF16_ROPE ? f32_to_bf16(y[i] * by) : f32_to_f16(y[i] * down));
  }
};

// Calls stage(query, n) for rows first, first + STRIDE, ..., of which COUNT, two or four, are on their way at a time.
template <int STRIDE, int COUNT, class F>
DEVICE void each_query(const LatentArgs& args, const Item& item, int first, int lane, const F& stage) {
  static_assert((COUNT == 2 || COUNT == 4) && ROWS % (COUNT * STRIDE) == 0, "rows");
#pragma unroll 1
  for (int n = first; n < ROWS; n += COUNT * STRIDE) {
    const Query a(args, item, n, lane), b(args, item, n + STRIDE, lane);
    if constexpr (COUNT == 4) {
      const Query c(args, item, n + 2 * STRIDE, lane), d(args, item, n + 3 * STRIDE, lane);
      stage(a, n), stage(b, n + STRIDE), stage(c, n + 2 * STRIDE), stage(d, n + 3 * STRIDE);
    } else {
      stage(a, n), stage(b, n + STRIDE);
    }
  }
}
