// A row of queries on its way in and of output on its way out: rotated by the four lanes of a warp that have it.
#pragma once
#include "prefill/work.cuh"

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
  row_max = max_f32(row_max, shfl_xor(row_max, 1));
  row_max = max_f32(row_max, shfl_xor(row_max, 2));
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
  row_max = max_f32(row_max, shfl_xor(row_max, 1));
  row_max = max_f32(row_max, shfl_xor(row_max, 2));
  // A power of two, which loses nothing.
  const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(row_max) >> 23), 1), 253);
  const float down = as_float((254 - exponent) << 23);
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pack_f16x2(x[8 * j + i] * down, x[8 * j + 4 + i] * down);
    *(Words4*)(operand + unit_at(j / 2, row, 2 * t + j % 2, GROUP_ROWS)) = {words[0], words[1], words[2], words[3]};
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
