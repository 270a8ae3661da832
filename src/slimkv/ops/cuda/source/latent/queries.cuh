// From a query row in global memory to operands: fp16 scaled by a power of two (bfloat16 for a bfloat16 rope part).
#pragma once
#include "common/rotation.cuh"
#include "latent/codes.cuh"
#include "latent/schedule.cuh"

constexpr int LEAST = 60;  // the exponent field of 2^-67, a lower bound

// The exponent field of a row's largest magnitude; at least LEAST. A lane has elements lane, lane + 32, ...
template <int DIM> DEVICE int exponent_of_row(const float (&x)[DIM / 32]) {
  float most = 0.0f;
  UNROLL_FOR (int i = 0; i < DIM / 32; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  return min_i32(max_i32((int)(warp_max(as_bits(most)) >> 23), LEAST), 253);
}

// Row n of a work tile as loaded: a lane has elements 2 lane, 2 lane + 1 of every 64 of the latent, and elements lane,
// lane + 32, ... of the rope part. Rows beyond the last are zeros.
struct RawQuery {
  static constexpr int PER_PAIR = Q_TYPE == FLOAT32 ? 2 : 1;  // words
  u32 latent[PER_PAIR * LD / 64], rope[RD / 32];

  DEVICE_MEMBER void load(const LatentArgs& args, const WorkTile& tile, int n, int lane) {
    const bool real = n < tile.count;
    const i64 query = tile.start + (tile.first_row + n) / args.num_heads;
    const i64 head = (tile.first_row + n) % args.num_heads;
    const i64 at = query * args.query_stride + head * args.query_head_stride + 2 * lane;
    const i64 rope_at = query * args.rope_stride + head * args.rope_head_stride + lane;
    UNROLL_FOR (int i = 0; i < LD / 64; i++) {
      if constexpr (Q_TYPE == FLOAT32) {
        const u32* const own = (const u32*)args.query + at + 64 * i;
        latent[2 * i] = real ? own[0] : 0, latent[2 * i + 1] = real ? own[1] : 0;
      } else {
        latent[i] = real ? *(const u32*)((const u16*)args.query + at + 64 * i) : 0;
      }
    }
    UNROLL_FOR (int i = 0; i < RD / 32; i++) {
      if (ROPE_TYPE == FLOAT32) rope[i] = real ? ((const u32*)args.rope)[rope_at + 32 * i] : 0;
      else rope[i] = real ? ((const u16*)args.rope)[rope_at + 32 * i] : 0;
    }
  }
};

DEVICE float number_of(u32 bits, int type) {
  return type == FLOAT32 ? as_float(bits) : type == BFLOAT16 ? as_float(bits << 16) : f16_to_f32(bits & 0xFFFF);
}

// A query row, converted to floats.
struct Query {
  float x[LD / 32], y[RD / 32];
  int exponent, rope_exponent, lane;
  bool real;

  DEVICE_MEMBER Query(const LatentArgs& args, const WorkTile& tile, const RawQuery& raw, int n, int lane_)
      : lane(lane_), real(n < tile.count) {
    UNROLL_FOR (int i = 0; i < LD / 32; i++)
      x[i] = Q_TYPE == FLOAT32          ? as_float(raw.latent[i % (RawQuery::PER_PAIR * LD / 64)])
          : Q_TYPE == BFLOAT16 && i % 2 ? as_float(raw.latent[i / 2] & 0xFFFF0000u)
                                        : number_of(raw.latent[i / 2] >> 16 * (i % 2), Q_TYPE);
    UNROLL_FOR (int i = 0; i < RD / 32; i++) y[i] = number_of(raw.rope[i], ROPE_TYPE);
    if (R_ROTATED) rotate<RD, 1>(y, args.rope_sign_bits, nullptr, nullptr, args.rope_norm, nullptr, lane);
    // A latent part 2^40 times smaller than the rope part makes no difference. The bound limits the units' ratio.
    rope_exponent = exponent_of_row<RD>(y), exponent = max_i32(exponent_of_row<LD>(x), rope_exponent - 40);
  }
  // The factors that turn operands back into numbers.
  DEVICE_MEMBER float latent_unit() const { return as_float((u32)exponent << 23) * L_UNIT; }
  DEVICE_MEMBER float rope_unit() const { return BF16_ROPE ? R_UNIT : as_float((u32)rope_exponent << 23) * R_UNIT; }
  // Calls put(column, bits), or put_pair(column, bits of two columns).
  template <class F, class G> DEVICE_MEMBER void latent_operand(const F& put, const G& put_pair) const {
    const float down = as_float((u32)(254 - exponent) << 23);
    UNROLL_FOR (int i = 0; i < LD / 64; i++) {
      const int d = 64 * i + 2 * lane;
      const u32 pair = pack_f16x2(x[2 * i] * down, x[2 * i + 1] * down);
      if constexpr (IN_BYTES) put_pair(d, pair);
      else put(place_of(d), pair & 0xFFFF), put(place_of(d + 1), pair >> 16);
    }
  }
  // `by`: a power of two, the factor for bfloat16.
  template <class F> DEVICE_MEMBER void rope_operand(const F& put, float by = 1.0f) const {
    const float down = as_float((u32)(254 - rope_exponent) << 23);
    UNROLL_FOR (int i = 0; i < RD / 32; i++)
      put(lane + 32 * i, BF16_ROPE ? f32_to_bf16(y[i] * by) : f32_to_f16(y[i] * down));
  }
};

// One warp: writes row n of ROWS as a wgmma operand at `to`, in chunks of 64 dimensions, first the latent's, then the
// rope part's. Returns the units of scores: of latents with levels in `level_unit`, and of rope parts relative to it.
struct Units { float latent, rope; };
DEVICE Units stage_operand(const LatentArgs& args, const Query& query, int n, u8* to, float level_unit) {
  const u32 sign = args.scale < 0.0f ? 0x8000u : 0u;  // makes units positive
  const float latent = query.latent_unit() * (level_unit / L_UNIT), ratio = query.rope_unit() / latent;
  auto place = [&](int at) { return at / 64 * ROWS * 128 + n * 128 + ((at % 64 / 8 ^ (n & 7)) << 4) + at % 8 * 2; };
  query.latent_operand([&](int at, u32 bits) { *(u16*)(to + place(at)) = (u16)(bits ^ sign); },
      [&](int at, u32 bits) { *(u32*)(to + place(at)) = bits ^ sign * 0x10001u; });
  query.rope_operand([&](int at, u32 bits) { *(u16*)(to + place(LD + at)) = (u16)(bits ^ sign); }, ratio);
  return {latent * as_float(as_bits(args.scale) & 0x7FFFFFFF), ratio};
}

// Calls stage(query, n) for rows first, first + STRIDE, ..., with loads of COUNT rows in flight. Rows shift through the
// registers of one row in a rolled loop, because unrolled code would run once and wait for instruction fetches.
template <int STRIDE, int COUNT, class F>
DEVICE void each_query(const LatentArgs& args, const WorkTile& tile, int first, int lane, const F& stage) {
#pragma unroll 1
  for (int n = first; n < ROWS;) {
    RawQuery raw[COUNT];
    UNROLL_FOR (int i = 0; i < COUNT; i++) raw[i].load(args, tile, n + i * STRIDE, lane);
#pragma unroll 1
    for (int i = 0; i < COUNT; i++, n += STRIDE) {
      if (ROWS % (COUNT * STRIDE) == 0 || n < ROWS) stage(Query(args, tile, raw[0], n, lane), n);
      UNROLL_FOR (int j = 1; j < COUNT; j++) raw[j - 1] = raw[j];
    }
  }
}
