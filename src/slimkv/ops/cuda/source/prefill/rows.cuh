// Loading query rows and storing output rows, each rotated by the four lanes that hold it (a quad).
#pragma once
#include "prefill/work.cuh"
#include "common/numbers.cuh"

DEVICE float largest_of_quad(const float (&x)[OWN]) {
  float most = 0.0f;
  UNROLL_FOR (int i = 0; i < OWN; i++) most = max_f32(most, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  return quad_max(most);
}
// Powers of two that scale numbers of magnitude up to `most` into fp16 and back, exactly.
struct HalfScale {
  float down, up;
  DEVICE_MEMBER HalfScale(float most, bool negative) {
    const u32 exponent = (u32)min_i32(max_i32((int)(as_bits(most) >> 23), 1), 253);
    down = as_float((254 - exponent) << 23 | (negative ? 0x80000000u : 0)), up = as_float(exponent << 23);
  }
};
// The factor that turns products into scores, for a row whose operand was divided by `up`.
DEVICE float row_factor(const PrefillArgs& args, float up) {
  return up * (K_ROTATED ? args.key_norm : 1.0f) * (args.scale < 0 ? -args.scale : args.scale);
}

#if (D & (D - 1)) == 0
// The Hadamard transform of a row of D numbers in a quad. Any distribution over the lanes gives the same transform.
DEVICE void hadamard_of_quad(float (&x)[OWN], int t) {
  butterflies(x);
  UNROLL_FOR (int d = 1; d < 4; d <<= 1) {
    const float sign = t & d ? -1.0f : 1.0f;
    UNROLL_FOR (int i = 0; i < OWN; i++) x[i] = fma_rn(x[i], sign, shfl_xor(x[i], d));
  }
}

// The dimension of a query that lane t of its quad holds at index `held`: two bits of the dimension are those of t, the
// other bits are `held`.
constexpr int LANE_LOW = EIGHT_BIT ? 4 : D == 64 ? 2 : 5, LANE_HIGH = EIGHT_BIT || D == 64 ? 5 : 6;
constexpr int BELOW = (1 << LANE_LOW) - 1, BETWEEN = (1 << (LANE_HIGH - 1)) - 1 - BELOW;
DEVICE int dimension_of(int held, int t) {
  return (held & BELOW) | (t & 1) << LANE_LOW | (held & BETWEEN) << 1 | (t >> 1) << LANE_HIGH |
      (held & ~(BELOW | BETWEEN)) << 2;
}
DEVICE int held_of(int dimension) {
  return (dimension & BELOW) | (dimension >> 1 & BETWEEN) | (dimension >> 2 & ~(BELOW | BETWEEN));
}
// The rotation's signs of up to 8 adjacent dimensions, aligned to their number.
struct Signs {
  u32 bits;
  DEVICE_MEMBER Signs(const u32* words, int first) : bits(words[first / 32] >> (first % 32) & 0xFF) {}
  // Dimensions 2 k and 2 k + 1, as the sign bits of two 16-bit floats.
  DEVICE_MEMBER u32 pair(int k) const { return bits * (0x40008000u >> (2 * k)) & 0x80008000u; }
};

// Loads and rotates a row of 32-bit queries, without the rotation's norm.
DEVICE void load_row(const PrefillArgs& args, bool valid, i64 at, int t, float (&x)[OWN]) {
  UNROLL_FOR (int i = 0; i < OWN; i++) {
    const int dim = dimension_of(i, t);
    x[i] = valid ? load_number(args.query, at + dim, FLOAT32) : 0.0f;
    if (K_ROTATED) x[i] = signed_by(x[i], args.key_sign_bits[dim / 32], dim % 32);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
}

// Loads two rows of 16-bit queries in a quad, two dimensions per word.
DEVICE void load_words(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], int t,
    u32 (&words)[2][OWN / 2]) {
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
}

// Rotates two rows of 16-bit queries in a quad, except for `butterflies`. Tensor cores transform four bits of the
// dimension's index (the lowest, the two lane bits, and one more): products with +-1 are exact and replace shuffles.
DEVICE void rotate_by_products(const PrefillArgs& args, u32 (&words)[2][OWN / 2], int g, int t, float (&x)[2][OWN]) {
  constexpr int RUN = LANE_LOW > 2 ? 4 : 2;  // adjacent words
  UNROLL_FOR (int i = 0; i < OWN / 2; i += RUN) {
    const Signs signs(args.key_sign_bits, dimension_of(2 * i, t));
    UNROLL_FOR (int k = 0; k < RUN; k++) words[0][i + k] ^= signs.pair(k), words[1][i + k] ^= signs.pair(k);
  }
  // Entry (k, n) of the 16-point transform is -1 to the power of the number of set bits that k and n share. Here, n is
  // g, and k is 2 t or 2 t + 1.
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
      *(u32*)(operand + unit_at(k / 4, row, 2 * (k % 4) + h, GROUP_ROWS) + 4 * t) =
          prmt(prmt(bytes[0], bytes[1], 0x0040), prmt(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  bad = x[0] * 0.0f;  // integers cannot represent a row with NaN, which the rotation has spread over the row
  return div_rn(most, 127.0f);
}
#else
// Writes row `row` of a warpgroup's queries to its operand. Returns the factor of the row's products, apart from the
// softmax scale.
DEVICE float store_operand(const float (&x)[OWN], bool negative, u8* operand, int row, int t, float&) {
  const HalfScale scale(largest_of_quad(x), negative);
  UNROLL_FOR (int u = 0; u < D / 32; u++) {
    const int dim = D == 64 ? 2 * u : 2 * (u % 4) + u / 4 * 128, of_lane = dim + dimension_of(0, t);
    u32 words[4];
    UNROLL_FOR (int i = 0; i < 4; i++)
      words[i] = pack_f16x2(x[held_of(dim + i % 2 + i / 2 * 8)] * scale.down,
          x[held_of(dim + i % 2 + i / 2 * 8 + 16)] * scale.down);
    const int low = of_lane / 2 % 4, high = of_lane / 32 % 2;
    *(Words4*)(operand + unit_at(of_lane / 64, row, FUSED ? 2 * low + high : 4 * high + low, GROUP_ROWS)) = {words[0],
        words[1], words[2], words[3]};
  }
  return scale.up;
}
#endif

// Writes a quad's two query rows to its warpgroup's operand. Returns the factors that turn products into scores.
DEVICE void prepare_rows(const PrefillArgs& args, const bool (&valid)[2], const i64 (&at)[2], u8* operand, int first,
    int t, float (&factor)[2], float (&bad)[2]) {
  float x[2][OWN];
  if constexpr (Q_TYPE == FLOAT32) {
    UNROLL_FOR (int r = 0; r < 2; r++) load_row(args, valid[r], at[r], t, x[r]);
  } else {
    u32 words[2][OWN / 2];
    load_words(args, valid, at, t, words);
    if (K_ROTATED) rotate_by_products(args, words, first % 8, t, x);
    UNROLL_FOR (int i = 0; !K_ROTATED && i < 2 * OWN; i++) {
      const u32 bits = words[i / OWN][i % OWN / 2] >> 16 * (i % 2) & 0xFFFF;
      x[i / OWN][i % OWN] = Q_TYPE == BFLOAT16 ? as_float(bits << 16) : f16_to_f32(bits);
    }
  }
#pragma unroll 1  // fetching code for the first time takes longer than running it
  for (int r = 0; r < 2; r++) {
    float is_bad = 0.0f;
    if (K_ROTATED && Q_TYPE != FLOAT32) butterflies(x[0], 4);
    const float of_row = row_factor(args, store_operand(x[0], args.scale < 0, operand, first + 8 * r, t, is_bad));
    factor[0] = r ? factor[0] : of_row, factor[1] = of_row;
    bad[0] = r ? bad[0] : is_bad, bad[1] = is_bad;
    UNROLL_FOR (int i = 0; i < OWN; i++) x[0][i] = x[1][i];
  }
}

// Writes a row's output from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b), already multiplied by the
// rotation's norm. A lane has two runs of 8 dimensions in each 64.
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
#include "prefill/core_rows.cuh"
#endif
