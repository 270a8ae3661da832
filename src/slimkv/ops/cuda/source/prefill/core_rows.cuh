// Query and output rows for head sizes that are a small core size (ROTATION_CORE) times a power of two: dimension
// ROTATION_CORE v + b is element b of vector v. Tensor cores multiply 8 rows by the core, and additions do the rest.
#pragma once
#include "prefill/work.cuh"

// The place of a dimension in keys and in values (tiles.cuh).
DEVICE int key_place(int d) {
  const int in_slice = (d & 8) >> 1 | (d & 1) << 1 | (d & 16) >> 4, t = (d & 6) >> 1;
  return d / 64 * 64 + in_slice + (!FUSED ? 8 * t + (d & 32) : d / 64 < WHOLE_HALVES ? 16 * t + (d & 32) / 4 : 8 * t);
}
DEVICE int value_place(int d) {
  const int in_slice = (d & 8) >> 2 | (d & 16) >> 4;
  return d / 64 * 64 + in_slice + (d / 64 < WHOLE_HALVES ? 8 * (d & 7) + (d & 32) / 8 : 4 * (d & 7));
}

DEVICE float sign_of(float x, const u32* bits, int d) { return signed_by(x, bits[d / 32], d % 32); }

// A lane's part of a row: elements 8 n + 2 t and 8 n + 2 t + 1 of every vector, if they exist (either both or none).
constexpr int VECTORS = D / ROTATION_CORE, CORE_TILES = (ROTATION_CORE + 7) / 8, CORE_STEPS = (ROTATION_CORE + 15) / 16;
struct CoreRow {
  float x[VECTORS][CORE_TILES][2];

  DEVICE_MEMBER static bool has(int n, int t) { return 8 * n + 2 * t < ROTATION_CORE; }
  DEVICE_MEMBER static int dimension(int v, int n, int t) { return ROTATION_CORE * v + 8 * n + 2 * t; }

  // Multiplies by the core or (`back`) its transpose. Rows g of the first operand are values rounded to bfloat16, rows
  // g + 8 the remainders.
  DEVICE_MEMBER void rotate(const u16* signs, const u32* bits, bool back, int g, int t) {
    u32 b[CORE_TILES][CORE_STEPS][2];
    auto entry = [&](int k, int n) -> u32 {  // without the sign of its row, which sign_of applies
      const int row = back ? n : k, column = back ? k : n;
      return k < ROTATION_CORE && n < ROTATION_CORE ? signs[row * D + column] ^ (bits[row / 32] >> (row % 32) & 1) << 15
                                                    : 0;
    };
    UNROLL_FOR (int n = 0; n < CORE_TILES; n++)
      UNROLL_FOR (int k = 0; k < 2 * CORE_STEPS; k++)
        b[n][k / 2][k % 2] = entry(8 * k + 2 * t, 8 * n + g) | entry(8 * k + 2 * t + 1, 8 * n + g) << 16;
    UNROLL_FOR (int v = 0; v < VECTORS; v++) {
      u32 high[2 * CORE_STEPS], low[2 * CORE_STEPS];
      UNROLL_FOR (int k = 0; k < 2 * CORE_STEPS; k++) {
        high[k] = low[k] = 0;
        if (k >= CORE_TILES) continue;
        const float first = x[v][k][0], second = x[v][k][1];
        high[k] = pack_bf16x2(first, second);
        low[k] = pack_bf16x2(first - as_float(high[k] << 16), second - as_float(high[k] & 0xFFFF0000u));
      }
      UNROLL_FOR (int n = 0; n < CORE_TILES; n++) {
        float c[4];
        mma_bf16_from_zero(c, high[0], low[0], high[1], low[1], b[n][0][0], b[n][0][1]);
        UNROLL_FOR (int k = 1; k < CORE_STEPS; k++)
          mma_bf16(c, high[2 * k], low[2 * k], high[2 * k + 1], low[2 * k + 1], b[n][k][0], b[n][k][1]);
        x[v][n][0] = c[0] + c[2], x[v][n][1] = c[1] + c[3];
      }
    }
    UNROLL_FOR (int d = 1; d < VECTORS; d <<= 1)
      UNROLL_FOR (int v = 0; v < VECTORS; v++)
        UNROLL_FOR (int i = 0; i < 2 * CORE_TILES; i++)
          if (!(v & d)) {
            const float lower = x[v][i / 2][i % 2], upper = x[v | d][i / 2][i % 2];
            x[v][i / 2][i % 2] = lower + upper, x[v | d][i / 2][i % 2] = lower - upper;
          }
  }
};

// Writes a quad's two query rows to its warpgroup's operand. Returns the factors that turn products into scores.
DEVICE void prepare_rows(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], u8* operand, int first,
    int t, float (&factor)[2], float (&)[2]) {
#pragma unroll 1
  for (int r = 0; r < 2; r++) {
    CoreRow row;
    UNROLL_FOR (int v = 0; v < VECTORS; v++)
      UNROLL_FOR (int i = 0; i < 2 * CORE_TILES; i++) {
        const int d = CoreRow::dimension(v, i / 2, t) + i % 2;
        float& x = row.x[v][i / 2][i % 2];
        x = (r ? valid[1] : valid[0]) && CoreRow::has(i / 2, t)
            ? load_number(args.query, (r ? at[1] : at[0]) + d, Q_TYPE)
            : 0.0f;
        if (K_ROTATED && CoreRow::has(i / 2, t)) x = sign_of(x, args.key_sign_bits, d);
      }
    if (K_ROTATED) row.rotate(args.key_signs, args.key_sign_bits, false, first % 8, t);
    float most = 0.0f;
    UNROLL_FOR (int v = 0; v < VECTORS; v++)
      UNROLL_FOR (int i = 0; i < 2 * CORE_TILES; i++)
        most = max_f32(most, as_float(as_bits(row.x[v][i / 2][i % 2]) & 0x7FFFFFFF));
    const HalfScale scale(quad_max(most), args.scale < 0);
    const int to = first + 8 * r;
    if (D < PLACES)
      UNROLL_FOR (int u = t; u < 8 * HALVES; u += 4)
        *(Words4*)(operand + unit_at(u / 8, to, u % 8, GROUP_ROWS)) = {0, 0, 0, 0};
    sync_warp();
    UNROLL_FOR (int v = 0; v < VECTORS; v++)
      UNROLL_FOR (int i = 0; i < 2 * CORE_TILES; i++) {
        if (!CoreRow::has(i / 2, t)) continue;
        const int place = key_place(CoreRow::dimension(v, i / 2, t) + i % 2);
        *(u16*)(operand + unit_at(place / 64, to, place % 64 / 8, GROUP_ROWS) + place % 8 * 2) =
            (u16)f32_to_f16(row.x[v][i / 2][i % 2] * scale.down);
      }
    const float f = row_factor(args, scale.up);
    if (r) factor[1] = f;
    else factor[0] = f;
  }
}

// Writes a row's output from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b), already multiplied by the
// rotation's norm. `staged`: room for 64 places of 8 rows of the warp, and as much in each further half of the operand.
DEVICE void store_row(const PrefillArgs& args, const float (&x)[OWN], i64 at, bool valid, u8* staged, int lane) {
  const int g = lane >> 2, t = lane & 3;
  auto place = [&](int i) { return (float*)(staged + i / 64 * 128 * GROUP_ROWS + 256 * g) + i % 64; };
  sync_warp();
  UNROLL_FOR (int i = 0; i < OWN; i++) *place(8 * (i / 2) + 2 * t + i % 2) = x[i];
  sync_warp();
  CoreRow row;
  UNROLL_FOR (int v = 0; v < VECTORS; v++)
    UNROLL_FOR (int i = 0; i < 2 * CORE_TILES; i++)
      row.x[v][i / 2][i % 2] =
          CoreRow::has(i / 2, t) ? *place(value_place(CoreRow::dimension(v, i / 2, t) + i % 2)) : 0.0f;
  if (V_ROTATED) row.rotate(args.value_signs, args.value_sign_bits, true, g, t);
  if (!valid) return;
  UNROLL_FOR (int v = 0; v < VECTORS; v++)
    UNROLL_FOR (int n = 0; n < CORE_TILES; n++) {
      if (!CoreRow::has(n, t)) continue;
      const int d = CoreRow::dimension(v, n, t);
      float y[2] = {row.x[v][n][0], row.x[v][n][1]};
      if (V_ROTATED) y[0] = sign_of(y[0], args.value_sign_bits, d), y[1] = sign_of(y[1], args.value_sign_bits, d + 1);
      if (OUT_TYPE == FLOAT32) {
        ((float*)args.out)[at + d] = y[0], ((float*)args.out)[at + d + 1] = y[1];
      } else {
        const u32 word = OUT_TYPE == FLOAT16 ? pack_f16x2(y[0], y[1]) : pack_bf16x2(y[0], y[1]);
        if (args.aligned & ALIGNED_OUTPUT) *(u32*)((u16*)args.out + at + d) = word;
        else ((u16*)args.out)[at + d] = (u16)word, ((u16*)args.out)[at + d + 1] = (u16)(word >> 16);
      }
    }
}
