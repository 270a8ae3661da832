// Rows of queries on their way in and of output on its way out: rotated by the four lanes of a warp that have them.
#pragma once
#include "prefill/work.cuh"
#include "common/numbers.cuh"

#if (D & (D - 1)) == 0
// The Hadamard transform of a row of D numbers in the 4 lanes of its quad, whichever of them each has.
DEVICE void hadamard_of_lane(float (&x)[OWN], int first) {
  UNROLL_FOR (int d = first; d < OWN; d <<= 1)
    UNROLL_FOR (int i = 0; i < OWN; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
}
DEVICE void hadamard_of_quad(float (&x)[OWN], int t) {
  hadamard_of_lane(x, 1);
  UNROLL_FOR (int d = 1; d < 4; d <<= 1) {
    const float sign = t & d ? -1.0f : 1.0f;
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = fma_rn(x[i], sign, shfl_xor(x[i], d));
  }
}

// The dimensions of a query that lane t of its quad holds: two bits of the dimension's index are those of t. The other
// bits index the lane's values.
constexpr int LANE_LOW = EIGHT_BIT ? 4 : D == 64 ? 2 : 5, LANE_HIGH = EIGHT_BIT || D == 64 ? 5 : 6;
constexpr int BELOW = (1 << LANE_LOW) - 1, BETWEEN = (1 << (LANE_HIGH - 1)) - 1 - BELOW;
DEVICE int dimension_of(int held, int t) {
  return (held & BELOW) | (t & 1) << LANE_LOW | (held & BETWEEN) << 1 | (t >> 1) << LANE_HIGH |
      (held & ~(BELOW | BETWEEN)) << 2;
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
  UNROLL_FOR (int i = 0; i < OWN; i++) {
    const int dim = dimension_of(i, t);
    x[i] = valid ? load_number(args.query, at + dim, Q_TYPE) : 0.0f;
    if (K_ROTATED) x[i] = signed_by(x[i], args.key_sign_bits[dim / 32], dim % 32);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
}

// Two rows of 16-bit queries of a quad. The tensor cores transform four bits of the dimension's index (the lowest, the
// two lane bits, and another): products with +-1 are exact, and lanes exchange nothing.
DEVICE void load_rows_by_products(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], int g, int t,
    float (&x)[2][OWN]) {
  u32 words[2][OWN / 2];
  UNROLL_FOR (int r = 0; r < 2; r++) {
    const u16* row = (const u16*)args.query + at[r];
    UNROLL_FOR (int i = 0; i < OWN / 2; i++) words[r][i] = 0;
    if (!valid[r]) continue;
    if (args.aligned & ALIGNED_QUERIES) {
      UNROLL_FOR (int i = 0; i < OWN / 2; i += 1 << (LANE_LOW > 2 ? 2 : 1)) {
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
      UNROLL_FOR (int i = 0; i < OWN / 2; i++) {
        const u16* from = row + dimension_of(2 * i, t);
        words[r][i] = (u32)from[0] | (u32)from[1] << 16;
      }
    }
  }
  constexpr int RUN = LANE_LOW > 2 ? 4 : 2;  // words side by side
  UNROLL_FOR (int i = 0; i < OWN / 2; i += RUN) {
    const Signs signs(args.key_sign_bits, dimension_of(2 * i, t));
    UNROLL_FOR (int k = 0; k < RUN; k++) words[0][i + k] ^= signs.pair(k), words[1][i + k] ^= signs.pair(k);
  }
  // Entry (k, n) of the 16-point transform is -1 to the number of ones that k and n share; here k = 2 t and 2 t + 1, n
  // = g.
  constexpr u32 ONES = Q_TYPE == BFLOAT16 ? 0x3F803F80u : 0x3C003C00u;
  const u32 shared_ones = (u32)(t & g >> 1), even = (shared_ones ^ shared_ones >> 1) & 1, odd = even ^ (u32)(g & 1);
  const u32 b = ONES ^ (even << 15 | odd << 31);
  UNROLL_FOR (int i = 0; i < OWN / 2; i += 2)
    UNROLL_FOR (int n = 0; n < 2; n++) {
      float c[4];
      const u32 second = n ? b ^ 0x80008000u : b;
      if (Q_TYPE == BFLOAT16)
        mma_bf16_from_zero(c, words[0][i], words[1][i], words[0][i + 1], words[1][i + 1], b, second);
      else mma_f16_from_zero(c, words[0][i], words[1][i], words[0][i + 1], words[1][i + 1], b, second);
      x[0][2 * i + 2 * n] = c[0], x[0][2 * i + 2 * n + 1] = c[1], x[1][2 * i + 2 * n] = c[2],
                       x[1][2 * i + 2 * n + 1] = c[3];
    }
  hadamard_of_lane(x[0], 4), hadamard_of_lane(x[1], 4);
}

DEVICE float largest_of_quad(const float (&x)[OWN]) {
  float most = 0.0f;
  UNROLL_FOR (int i = 0; i < OWN; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  return quad_max(most);
}

#if EIGHT_BIT
// Writes row `row` of a warpgroup's queries to its operand as signed bytes, rounded to nearest, with the largest at
// 127. Returns the factor of the row's products, apart from the softmax scale. `bad`: 0, or NaN.
DEVICE float store_operand(const float (&x)[OWN], bool negative, u8* operand, int row, int t, float& bad) {
  const float most = largest_of_quad(x);
  float up = most > 0.0f ? div_rn(127.0f, most) : 0.0f;
  if (negative) up = -up;
  UNROLL_FOR (int k = 0; k < D / 32; k++)
    UNROLL_FOR (int h = 0; h < 2; h++) {
      u32 bytes[4];
      UNROLL_FOR (int i = 0; i < 4; i++)
        bytes[i] = as_bits(fma_rn(x[k / 2 * 16 + 2 * (2 * (k % 2) + h) + i % 2 + 8 * (i / 2)], up, MAGIC_FLOAT));
      *(u32*)(operand + unit_at(0, row, 2 * k + h, GROUP_ROWS) + 4 * t) =
          prmt(prmt(bytes[0], bytes[1], 0x0040), prmt(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  bad = x[0] * 0.0f;  // a row that is not a number, all of it once rotated, has no integers
  return div_rn(most, 127.0f);
}
#else
// Writes row `row` of a warpgroup's queries to its operand. Returns the factor of the row's products, apart from the
// softmax scale.
DEVICE float store_operand(const float (&x)[OWN], bool negative, u8* operand, int row, int t, float&) {
  // A power of two, which loses nothing.
  const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(largest_of_quad(x)) >> 23), 1), 253);
  const float down = as_float((254 - exponent) << 23 | (negative ? 0x80000000u : 0));
  UNROLL_FOR (int u = 0; u < D / 32; u++) {
    const int dim = D == 64 ? 2 * u : 2 * (u % 4) + u / 4 * 128, of_lane = dim + dimension_of(0, t);
    u32 words[4];
    UNROLL_FOR (int i = 0; i < 4; i++)
      words[i] =
          pack_f16x2(x[held_of(dim + i % 2 + i / 2 * 8)] * down, x[held_of(dim + i % 2 + i / 2 * 8 + 16)] * down);
    const int low = of_lane / 2 % 4, high = of_lane / 32 % 2;
    *(Words4*)(operand + unit_at(of_lane / 64, row, FUSED ? 2 * low + high : 4 * high + low, GROUP_ROWS)) = {words[0],
        words[1], words[2], words[3]};
  }
  return as_float(exponent << 23);
}
#endif

// The two rows of a quad to the operand of their warpgroup; what each is to be multiplied by after the product.
DEVICE void prepare_rows(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], u8* operand, int first,
    int t, float (&factor)[2], float (&bad)[2]) {
  float x[2][OWN];
  if constexpr (K_ROTATED && Q_TYPE != FLOAT32) {
    load_rows_by_products(args, valid, at, first % 8, t, x);
  } else {
    UNROLL_FOR (int r = 0; r < 2; r++) load_row(args, valid[r], at[r], t, x[r]);
  }
  UNROLL_FOR (int r = 0; r < 2; r++)
    factor[r] = store_operand(x[r], args.scale < 0, operand, first + 8 * r, t, bad[r]) *
        (K_ROTATED ? args.key_norm : 1.0f) * (args.scale < 0 ? -args.scale : args.scale);
}

// Writes a row's result from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b), times the rotation's factor:
// two runs of 8 dimensions in each 64.
DEVICE void store_row(const PrefillArgs& args, float (&x)[OWN], i64 at, bool valid, u8*, int lane) {
  const int t = lane & 3;
  if (V_ROTATED) hadamard_of_quad(x, t);
  if (!valid) return;
  UNROLL_FOR (int h = 0; h < D / 32; h++) {
    const int first = 64 * (h / 2) + 32 * (t / 2) + 16 * (h % 2) + 8 * (t % 2);
    float y[8];
    UNROLL_FOR (int i = 0; i < 8; i++) y[i] = x[2 * (8 * (h / 2) + i) + h % 2];
    const i64 to = at + first;
    const Signs signs(args.value_sign_bits, first);
    if (OUT_TYPE == FLOAT32) {
      UNROLL_FOR (int i = 0; V_ROTATED && i < 8; i++) y[i] = signed_by(y[i], signs.bits, i);
      UNROLL_FOR (int i = 0; i < 8; i += 4)
        if (args.aligned & ALIGNED_OUTPUT)
          *(Words4*)((float*)args.out + to + i) = {as_bits(y[i]), as_bits(y[i + 1]), as_bits(y[i + 2]),
              as_bits(y[i + 3])};
        else
          UNROLL_FOR (int k = i; k < i + 4; k++) ((float*)args.out)[to + k] = y[k];
    } else {
      u32 words[4];
      UNROLL_FOR (int k = 0; k < 4; k++) {
        words[k] = OUT_TYPE == FLOAT16 ? pack_f16x2(y[2 * k], y[2 * k + 1]) : pack_bf16x2(y[2 * k], y[2 * k + 1]);
        if (V_ROTATED) words[k] ^= signs.pair(k);
      }
      if (args.aligned & ALIGNED_OUTPUT) *(Words4*)((u16*)args.out + to) = {words[0], words[1], words[2], words[3]};
      else
        UNROLL_FOR (int k = 0; k < 8; k++) ((u16*)args.out)[to + k] = (u16)(words[k / 2] >> (16 * (k % 2)));
    }
  }
}

#else
// Head sizes that are a small core size (ROTATION_CORE) times a power of two: dimension ROTATION_CORE v + b is element
// b of vector v. The tensor cores multiply by the core, 8 rows at a time; additions do the rest.

// Where a dimension is among the places of keys and of values (tiles.cuh).
DEVICE int key_place(int d) {
  const int in_slice = (d & 8) >> 1 | (d & 1) << 1 | (d & 16) >> 4, t = (d & 6) >> 1;
  return d / 64 * 64 + in_slice + (!FUSED ? 8 * t + (d & 32) : d / 64 < WHOLE_HALVES ? 16 * t + (d & 32) / 4 : 8 * t);
}
DEVICE int value_place(int d) {
  const int in_slice = (d & 8) >> 2 | (d & 16) >> 4;
  return d / 64 * 64 + in_slice + (d / 64 < WHOLE_HALVES ? 8 * (d & 7) + (d & 32) / 8 : 4 * (d & 7));
}

DEVICE float sign_of(float x, const u32* bits, int d) { return signed_by(x, bits[d / 32], d % 32); }

// Value i of a lane's part of a row: the lane holds values 8 n + 2 t and 8 n + 2 t + 1 of every vector, where they
// exist.
constexpr int VECTORS = D / ROTATION_CORE, CORE_TILES = (ROTATION_CORE + 7) / 8, CORE_STEPS = (ROTATION_CORE + 15) / 16;
struct CoreRow {
  float x[VECTORS][CORE_TILES][2];

  DEVICE_MEMBER static bool has(int n, int t) {
    return 8 * n + 2 * t < ROTATION_CORE;
  }  // the number of entries is even
  DEVICE_MEMBER static int dimension(int v, int n, int t) { return ROTATION_CORE * v + 8 * n + 2 * t; }

  // Multiplies by the core, or its transpose. Rows g of the first operand are values rounded to bfloat16, rows g + 8
  // the remainders.
  DEVICE_MEMBER void rotate(const u16* signs, const u32* bits, bool back, int g, int t) {
    u32 b[CORE_TILES][CORE_STEPS][2];
    auto entry = [&](int k, int n) -> u32 {  // without the sign of its row, which dimensions have
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

// The two rows of a quad to the operand of their warpgroup; what each is to be multiplied by after the product.
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
    most = quad_max(most);
    // A power of two, which loses nothing.
    const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(most) >> 23), 1), 253);
    const float down = as_float((254 - exponent) << 23 | (args.scale < 0 ? 0x80000000u : 0));
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
            (u16)f32_to_f16(row.x[v][i / 2][i % 2] * down);
      }
    const float f =
        as_float(exponent << 23) * (K_ROTATED ? args.key_norm : 1.0f) * (args.scale < 0 ? -args.scale : args.scale);
    if (r) factor[1] = f;
    else factor[0] = f;
  }
}

// Writes a row's result from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b), times the rotation's factor.
// `staged`: room for 64 places of 8 rows of the warp, and as much in each further half of the operand.
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
#endif
