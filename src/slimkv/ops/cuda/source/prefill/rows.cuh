// Rows of queries on their way in and of output on its way out: rotated by the four lanes of a warp that have them.
#pragma once
#include "prefill/work.cuh"
#include "common/rotation.cuh"

// The Hadamard transform of a row of D numbers in the 4 lanes of its quad, whichever of them each has.
DEVICE void hadamard_of_lane(float (&x)[OWN], int first) {
#pragma unroll
  for (int d = first; d < OWN; d <<= 1)
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
}
DEVICE void hadamard_of_quad(float (&x)[OWN], int t) {
  hadamard_of_lane(x, 1);
#pragma unroll
  for (int d = 1; d < 4; d <<= 1) {
    const float sign = t & d ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] = fma_rn(x[i], sign, shfl_xor(x[i], d));
  }
}

// Which dimensions of a query lane t of its quad has: two bits of their number are those of t. The others number what it holds.
constexpr int LANE_LOW = EIGHT_BIT ? 4 : D == 64 ? 2 : 5, LANE_HIGH = EIGHT_BIT || D == 64 ? 5 : 6;
constexpr int BELOW = (1 << LANE_LOW) - 1, BETWEEN = (1 << (LANE_HIGH - 1)) - 1 - BELOW;
DEVICE int dimension_of(int held, int t) {
  return (held & BELOW) | (t & 1) << LANE_LOW | (held & BETWEEN) << 1 | (t >> 1) << LANE_HIGH | (held & ~(BELOW | BETWEEN)) << 2;
}
DEVICE int held_of(int dimension) {
  return (dimension & BELOW) | (dimension >> 1 & BETWEEN) | (dimension >> 2 & ~(BELOW | BETWEEN));
}
// The rotation's signs of up to 8 dimensions side by side, of which the first is a multiple of their number.
struct Signs {
  u32 bits;
  DEVICE_MEMBER Signs(const u32* words, int first) : bits(words[first / 32] >> (first % 32) & 0xFF) {}
  // Of dimensions 2 k and 2 k + 1, as those of two 16-bit floats.
  DEVICE_MEMBER u32 pair(int k) const { return bits * (0x40008000u >> (2 * k)) & 0x80008000u; }
};

// A row of queries, as it is but for the rotation's factor.
DEVICE void load_row(const PrefillArgs& args, bool valid, i64 at, int t, float (&x)[OWN]) {
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int dim = dimension_of(i, t);
    x[i] = valid ? load_number(args.query, at + dim, Q_TYPE) : 0.0f;
    if (K_ROTATED) x[i] = signed_by(x[i], args.key_sign_bits[dim / 32], dim % 32);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
}

// Two rows of 16-bit queries of a quad. Of the number of a dimension, four bits (the lowest, the two of lanes, and another) are
// transformed by the tensor cores: products with +-1 are exact, and nothing is exchanged between lanes.
DEVICE void load_rows_by_products(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], int g, int t, float (&x)[2][OWN]) {
  u32 words[2][OWN / 2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u16* row = (const u16*)args.query + at[r];
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) words[r][i] = 0;
    if (!valid[r]) continue;
    if (args.aligned & ALIGNED_QUERIES) {
#pragma unroll
      for (int i = 0; i < OWN / 2; i += 1 << (LANE_LOW > 2 ? 2 : 1)) {
        const u16* from = row + dimension_of(2 * i, t);
        if constexpr (LANE_LOW > 2) {
          const Words4 w = *(const Words4*)from;
          words[r][i] = w.x, words[r][i + 1] = w.y, words[r][i + 2] = w.z, words[r][i + 3] = w.w;
        } else {
          const Words2 w = *(const Words2*)from;
          words[r][i] = w.x, words[r][i + 1] = w.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < OWN / 2; i++) {
        const u16* from = row + dimension_of(2 * i, t);
        words[r][i] = (u32)from[0] | (u32)from[1] << 16;
      }
    }
  }
  constexpr int RUN = LANE_LOW > 2 ? 4 : 2;  // words side by side
#pragma unroll
  for (int i = 0; i < OWN / 2; i += RUN) {
    const Signs signs(args.key_sign_bits, dimension_of(2 * i, t));
#pragma unroll
    for (int k = 0; k < RUN; k++) words[0][i + k] ^= signs.pair(k), words[1][i + k] ^= signs.pair(k);
  }
  // Entry (k, n) of the transform of 16 numbers is -1 to the number of ones that k and n share: here k = 2 t and 2 t + 1, n = g.
  constexpr u32 ONES = Q_TYPE == BFLOAT16 ? 0x3F803F80u : 0x3C003C00u;
  const u32 shared_ones = (u32)(t & g >> 1), even = (shared_ones ^ shared_ones >> 1) & 1, odd = even ^ (u32)(g & 1);
  const u32 b = ONES ^ (even << 15 | odd << 31);
#pragma unroll
  for (int i = 0; i < OWN / 2; i += 2)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float c[4];
      const u32 second = n ? b ^ 0x80008000u : b;
      if (Q_TYPE == BFLOAT16) mma_bf16_from_zero(c, words[0][i], words[1][i], words[0][i + 1], words[1][i + 1], b, second);
      else mma_f16_from_zero(c, words[0][i], words[1][i], words[0][i + 1], words[1][i + 1], b, second);
      x[0][2 * i + 2 * n] = c[0], x[0][2 * i + 2 * n + 1] = c[1], x[1][2 * i + 2 * n] = c[2], x[1][2 * i + 2 * n + 1] = c[3];
    }
  hadamard_of_lane(x[0], 4), hadamard_of_lane(x[1], 4);
}

DEVICE float largest_of_quad(const float (&x)[OWN]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  return quad_max(most);
}

#if EIGHT_BIT
// Row `row` of a warpgroup's queries to its operand as signed bytes; what the row is to be multiplied by after the product, beside
// the factor of scores. Rounded to the nearest integer, the largest to 127. `bad`: 0, or not a number.
DEVICE float store_operand(const float (&x)[OWN], bool negative, u8* operand, int row, int t, float& bad) {
  const float most = largest_of_quad(x);
  float up = most > 0.0f ? div_rn(127.0f, most) : 0.0f;
  if (negative) up = -up;
#pragma unroll
  for (int k = 0; k < D / 32; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 bytes[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        bytes[i] = as_bits(fma_rn(x[k / 2 * 16 + 2 * (2 * (k % 2) + h) + i % 2 + 8 * (i / 2)], up, MAGIC_FLOAT));
      *(u32*)(operand + unit_at(0, row, 2 * k + h, GROUP_ROWS) + 4 * t) =
          prmt(prmt(bytes[0], bytes[1], 0x0040), prmt(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  bad = x[0] * 0.0f;  // a row that is not a number, all of it once rotated, has no integers
  return div_rn(most, 127.0f);
}
#else
// Row `row` of a warpgroup's queries to its operand; what the row is to be multiplied by after the product, beside the factor of scores.
DEVICE float store_operand(const float (&x)[OWN], bool negative, u8* operand, int row, int t, float&) {
  // A power of two, which loses nothing.
  const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(largest_of_quad(x)) >> 23), 1), 253);
  const float down = as_float((254 - exponent) << 23 | (negative ? 0x80000000u : 0));
#pragma unroll
  for (int u = 0; u < D / 32; u++) {
    const int dim = D == 64 ? 2 * u : 2 * (u % 4) + u / 4 * 128, of_lane = dim + dimension_of(0, t);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = pack_f16x2(x[held_of(dim + i % 2 + i / 2 * 8)] * down, x[held_of(dim + i % 2 + i / 2 * 8 + 16)] * down);
    const int low = of_lane / 2 % 4, high = of_lane / 32 % 2;
    *(Words4*)(operand + unit_at(of_lane / 64, row, FUSED ? 2 * low + high : 4 * high + low, GROUP_ROWS)) = {words[0], words[1], words[2], words[3]};
  }
  return as_float(exponent << 23);
}
#endif

// The two rows of a quad to the operand of their warpgroup; what each is to be multiplied by after the product.
DEVICE void prepare_rows_of_quad(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], u8* operand, int first, int t,
                                 float (&factor)[2], float (&bad)[2]) {
  float x[2][OWN];
  if constexpr (K_ROTATED && Q_TYPE != FLOAT32) {
    load_rows_by_products(args, valid, at, first % 8, t, x);
  } else {
#pragma unroll
    for (int r = 0; r < 2; r++) load_row(args, valid[r], at[r], t, x[r]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
    factor[r] = store_operand(x[r], args.scale < 0, operand, first + 8 * r, t, bad[r]) * (K_ROTATED ? args.key_norm : 1.0f) *
                (args.scale < 0 ? -args.scale : args.scale);
}

// A row's result from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b), times the rotation's factor: twice 8 dimensions
// side by side of each 64.
DEVICE void store_row(const PrefillArgs& args, float (&x)[OWN], i64 at, bool valid, int t) {
  if (V_ROTATED) hadamard_of_quad(x, t);
  if (!valid) return;
#pragma unroll
  for (int h = 0; h < D / 32; h++) {
    const int first = 64 * (h / 2) + 32 * (t / 2) + 16 * (h % 2) + 8 * (t % 2);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = x[2 * (8 * (h / 2) + i) + h % 2];
    const i64 to = at + first;
    const Signs signs(args.value_sign_bits, first);
    if (OUT_TYPE == FLOAT32) {
#pragma unroll
      for (int i = 0; V_ROTATED && i < 8; i++) y[i] = signed_by(y[i], signs.bits, i);
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        if (args.aligned & ALIGNED_OUTPUT)
          *(Words4*)((float*)args.out + to + i) = {as_bits(y[i]), as_bits(y[i + 1]), as_bits(y[i + 2]), as_bits(y[i + 3])};
        else
#pragma unroll
          for (int k = i; k < i + 4; k++) ((float*)args.out)[to + k] = y[k];
    } else {
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        words[k] = OUT_TYPE == FLOAT16 ? pack_f16x2(y[2 * k], y[2 * k + 1]) : pack_bf16x2(y[2 * k], y[2 * k + 1]);
        if (V_ROTATED) words[k] ^= signs.pair(k);
      }
      if (args.aligned & ALIGNED_OUTPUT) *(Words4*)((u16*)args.out + to) = {words[0], words[1], words[2], words[3]};
      else
#pragma unroll
        for (int k = 0; k < 8; k++) ((u16*)args.out)[to + k] = (u16)(words[k / 2] >> (16 * (k % 2)));
    }
  }
}

// Rows of head sizes whose rotation is not one of quads: a row at a time by a whole warp, whose scratch has D floats.

// Where a dimension is among the places of keys and of values (tiles.cuh).
DEVICE int key_place(int d) {
  const int in_slice = (d & 8) >> 1 | (d & 1) << 1 | (d & 16) >> 4, t = (d & 6) >> 1;
  return d / 64 * 64 + in_slice + (!FUSED ? 8 * t + (d & 32) : d / 64 < WHOLE_HALVES ? 16 * t + (d & 32) / 4 : 8 * t);
}
DEVICE int value_place(int d) {
  const int in_slice = (d & 8) >> 2 | (d & 16) >> 4;
  return d / 64 * 64 + in_slice + (d / 64 < WHOLE_HALVES ? 8 * (d & 7) + (d & 32) / 8 : 4 * (d & 7));
}

// The 16 rows of a warp to their operand; what those of this lane are to be multiplied by after the product.
DEVICE void prepare_rows(const PrefillArgs& args, const Work& w, u8* operand, float* scratch, int warpgroup, int warp, float (&factor)[2],
                         int lane) {
  constexpr int QN = (D + 31) / 32;
  for (int r = 0; r < 16; r++) {
    const Row row = row_of(args, w, warpgroup, 16 * warp + r);
    const i64 at = row.query * args.query_stride + row.head * args.query_head_stride;
    float x[QN];
#pragma unroll
    for (int i = 0; i < QN; i++) {
      const int d = lane + 32 * i;
      x[i] = row.valid && d < D ? load_number(args.query, at + d, Q_TYPE) : 0.0f;
      if (args.scale < 0) x[i] = -x[i];
    }
    if (K_ROTATED) rotate<D, ROTATION_CORE>(x, args.key_sign_bits, args.key_signs, args.key_norm, scratch, lane);
    float row_max = 0.0f;
#pragma unroll
    for (int i = 0; i < QN; i++) row_max = max_f32(row_max, lane + 32 * i < D ? as_float(as_bits(x[i]) & 0x7FFFFFFF) : 0.0f);
#pragma unroll
    for (int d = 16; d; d >>= 1) row_max = max_f32(row_max, shfl_xor(row_max, d));
    // A power of two, which loses nothing.
    const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(row_max) >> 23), 1), 253);
    const float down = as_float((254 - exponent) << 23);
    auto place = [&](int at) { return operand + unit_at(at / 64, 16 * warp + r, at % 64 / 8, GROUP_ROWS) + at % 8 * 2; };
    if (D < PLACES)
      for (int i = lane; i < 8 * HALVES; i += 32) *(Words4*)(operand + unit_at(i / 8, 16 * warp + r, i % 8, GROUP_ROWS)) = {0, 0, 0, 0};
    sync_warp();
#pragma unroll
    for (int i = 0; i < QN; i++)
      if (lane + 32 * i < D) *(u16*)place(key_place(lane + 32 * i)) = (u16)f32_to_f16(x[i] * down);
    if (lane / 4 == r % 8) factor[r / 8] = as_float(exponent << 23) * (args.scale < 0 ? -args.scale : args.scale);
  }
}

// Rows first to first + 7 of a warp from its quads' accumulators to the output, through the operand of its queries, which nobody
// needs any more once its warpgroup is here.
DEVICE void store_rows(const PrefillArgs& args, const Work& w, const float (&x)[OWN], u8* operand, float* scratch, int warpgroup, int warp,
                       int first, int lane) {
  constexpr int QN = (D + 31) / 32;
  const int g = lane >> 2, t = lane & 3;
  auto place = [&](int r, int at) { return (float*)(operand + at / 64 * 128 * GROUP_ROWS + 2048 * warp + 256 * r) + at % 64; };
  if (first == 0) bar_sync(1 + warpgroup, 128);
  sync_warp();
#pragma unroll
  for (int i = 0; i < OWN; i++) *place(g, 8 * (i / 2) + 2 * t + i % 2) = x[i];
  sync_warp();
  for (int r = 0; r < 8; r++) {
    float y[QN];
#pragma unroll
    for (int i = 0; i < QN; i++) y[i] = lane + 32 * i < D ? *place(r, value_place(lane + 32 * i)) : 0.0f;
    if (V_ROTATED) unrotate<D, ROTATION_CORE>(y, args.value_sign_bits, args.value_signs, args.value_norm, scratch, lane);
    const Row row = row_of(args, w, warpgroup, 16 * warp + first + r);
    const i64 at = row.query * args.out_stride + row.head * args.out_head_stride;
#pragma unroll
    for (int i = 0; i < QN; i++) {
      const int d = lane + 32 * i;
      if (!row.valid || d >= D) continue;
      if (OUT_TYPE == FLOAT32) ((float*)args.out)[at + d] = y[i];
      else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == FLOAT16 ? f32_to_f16(y[i]) : f32_to_bf16(y[i]));
    }
  }
}
