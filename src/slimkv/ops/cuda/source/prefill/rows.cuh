// A row of queries on its way in and of output on its way out: rotated by the four lanes of a warp that have it.
#pragma once
#include "prefill/work.cuh"
#if FUSED
#include "common/rotation.cuh"
#endif

// The Hadamard transform of a row of D numbers in the 4 lanes of its quad.
DEVICE void hadamard_of_quad(float (&x)[OWN], int t) {
#pragma unroll
  for (int d = 1; d < OWN; d <<= 1)
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
#pragma unroll
  for (int d = 1; d < 4; d <<= 1)
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float other = shfl_xor(x[i], d);
      x[i] = t & d ? other - x[i] : x[i] + other;
    }
}

#if EIGHT_BIT
// Row `row` of a warpgroup's queries to its operand as signed bytes, by the quad, whose lane t has the 16 dimensions of every 64
// that follow 16 t; what the row is to be multiplied by after the product. Rounded to the nearest integer, the largest to 127.
// `bad`: 0, or not a number.
DEVICE float prepare_row(const PrefillArgs& args, bool valid, i64 at, u8* operand, int row, int t, float& bad) {
  float x[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int dim = 64 * (i / 16) + 16 * t + i % 16;
    x[i] = valid ? load_number(args.query, at + dim, Q_TYPE) : 0.0f;
    if (args.scale < 0) x[i] = -x[i];
    if (K_ROTATED) x[i] = signed_by(x[i] * args.key_norm, args.key_sign_bits[2 * (i / 16) + t / 2], 16 * (t & 1) + i % 16);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
  float row_max = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) row_max = max_f32(row_max, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  row_max = quad_max(row_max);
  const float up = row_max > 0.0f ? div_rn(127.0f, row_max) : 0.0f;
#pragma unroll
  for (int k = 0; k < D / 32; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 bytes[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        bytes[i] = as_bits(add_rn(mul_rn(x[k / 2 * 16 + 2 * (2 * (k % 2) + h) + i % 2 + 8 * (i / 2)], up), MAGIC_FLOAT));
      *(u32*)(operand + unit_at(0, row, 2 * k + h, GROUP_ROWS) + 4 * t) =
          prmt(prmt(bytes[0], bytes[1], 0x0040), prmt(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  bad = x[0] * 0.0f;  // a row that is not a number, all of it once rotated, has no integers
  return div_rn(row_max, 127.0f) * (args.scale < 0 ? -args.scale : args.scale);
}
#else
// Row `row` of a warpgroup's queries to its operand, by the quad; what the row is to be multiplied by after the product.
DEVICE float prepare_row(const PrefillArgs& args, bool valid, i64 at, u8* operand, int row, int t, float&) {
  float x[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int dim = 32 * (i / 8) + 16 * (i / 4 % 2) + 8 * (i / 2 % 2) + 2 * t + i % 2;
    x[i] = valid ? load_number(args.query, at + dim, Q_TYPE) : 0.0f;
    if (args.scale < 0) x[i] = -x[i];
    if (K_ROTATED) x[i] = signed_by(x[i] * args.key_norm, args.key_sign_bits[i / 8], dim % 32);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
  float row_max = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) row_max = max_f32(row_max, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  row_max = quad_max(row_max);
  // A power of two, which loses nothing.
  const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(row_max) >> 23), 1), 253);
  const float down = as_float((254 - exponent) << 23);
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pack_f16x2(x[8 * j + i] * down, x[8 * j + 4 + i] * down);
    *(Words4*)(operand + unit_at(j / 2, row, FUSED ? 2 * t + j % 2 : 4 * (j % 2) + t, GROUP_ROWS)) = {words[0], words[1], words[2], words[3]};
  }
  return as_float(exponent << 23) * (args.scale < 0 ? -args.scale : args.scale);
}
#endif

// A row's result from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b): twice 8 dimensions side by side of each 64.
DEVICE void store_row(const PrefillArgs& args, float (&x)[OWN], i64 at, bool valid, int t) {
  if (V_ROTATED) hadamard_of_quad(x, t);
  if (!valid) return;
#pragma unroll
  for (int h = 0; h < D / 32; h++) {
    const int first = 32 * (t / 2) + 16 * (h % 2) + 8 * (t % 2);  // of 64
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      y[i] = x[2 * (8 * (h / 2) + i) + h % 2];
      if (V_ROTATED) y[i] = signed_by(y[i] * args.value_norm, args.value_sign_bits[2 * (h / 2) + t / 2], first % 32 + i);
    }
    const i64 to = at + 64 * (h / 2) + first;
    if (OUT_TYPE == FLOAT32) {
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        if (args.aligned)
          *(Words4*)((float*)args.out + to + i) = {as_bits(y[i]), as_bits(y[i + 1]), as_bits(y[i + 2]), as_bits(y[i + 3])};
        else
#pragma unroll
          for (int k = i; k < i + 4; k++) ((float*)args.out)[to + k] = y[k];
    } else {
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        words[k] = OUT_TYPE == FLOAT16 ? pack_f16x2(y[2 * k], y[2 * k + 1]) : f32_to_bf16(y[2 * k]) | f32_to_bf16(y[2 * k + 1]) << 16;
      if (args.aligned) *(Words4*)((u16*)args.out + to) = {words[0], words[1], words[2], words[3]};
      else
#pragma unroll
        for (int k = 0; k < 8; k++) ((u16*)args.out)[to + k] = (u16)(words[k / 2] >> (16 * (k % 2)));
    }
  }
}

#if FUSED
// Rows of head sizes whose rotation is not one of quads: a row at a time by a whole warp, whose scratch has D floats.

// Where a dimension is among the places of keys and of values (tiles.cuh).
DEVICE int key_place(int d) {
  const int in_slice = (d & 8) >> 1 | (d & 1) << 1 | (d & 16) >> 4, t = (d & 6) >> 1;
  return d / 64 * 64 + in_slice + (d / 64 < WHOLE_HALVES ? 16 * t + (d & 32) / 4 : 8 * t);
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
#endif
