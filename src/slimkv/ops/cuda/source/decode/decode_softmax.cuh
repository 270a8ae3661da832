// From a warp's scores to the probability operand of the products with values, and the accumulator of those products.
#pragma once
#include "decode/softmax.cuh"

constexpr bool V_AS_STORED = !WIDE && V_IN_PAIRS;
constexpr int OUT_NUMBERS = OUT_IN_PRODUCTS ? 4 : 2;

// Narrow bytes: exponents are raised, so that exponentials can be multiplied by scales as stored. The running maximum
// is updated if an exponent gets too high.
constexpr float RAISED_BY = 16.0f, RAISED = 65536.0f, MOST_RAISED = RAISED_BY + 24.0f;

// The output and the online softmax. Bytes: out[n][i][r] is dimension 16 i + g + 8 r of column 4 n + t. Wide:
// out[n][i][2 r + j] is the same dimension of column 8 n + 2 t + j. Narrow halves: the sum out[n][i][2 r] +
// out[n][i][2 r + 1] is the dimension; with V_AS_STORED, out[n][i + r] for even i holds slices i and i + 1.
struct Accumulator : RunningSoftmax {
  static constexpr int SLICES = V_AS_STORED ? (VS + 1) / 2 * 2 : VS;
  float out[NG][SLICES][OUT_NUMBERS];

  // Dimension 16 i + g + 8 r of the lane's column OWN n + j.
  DEVICE_MEMBER float number(int n, int i, int r, int j) const {
    if (!OUT_IN_PRODUCTS) return out[n][i][r];
    if (WIDE) return out[n][i][(2 * r + j) % OUT_NUMBERS];
    const float (&pair)[OUT_NUMBERS] = out[n][V_AS_STORED ? i / 2 * 2 + r : i];
    const int at = 2 * (V_AS_STORED ? i % 2 : r) % OUT_NUMBERS;
    return pair[at] + pair[at + 1];
  }

  DEVICE_MEMBER void clear() {
    RunningSoftmax::clear();
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int i = 0; i < SLICES; i++)
        UNROLL_FOR (int j = 0; j < OUT_NUMBERS; j++) out[n][i][j] = 0;
  }
};

// Probabilities times their values' scales, as MMA operands.
struct Probabilities {
  u32 p[NG][NT][2];  // bytes: one word, of tokens 2 t, 2 t + 8, 2 t + 1, 2 t + 9
  float fold[NG];  // bytes: the factor that turns integer products into outputs
  i32 offset[NG];  // bytes: minus the levels' offset, 63.5, times the sum of the probabilities
};

// Updates the running maximum of columns from the scores of a step, and rescales sums and output. `moves`: one bit for
// each of the lane's columns to be updated. A column must depend on its own scores alone.
DEVICE void update_max(const u8* slot, const ColumnState& columns, int g, const StepScores& s, Accumulator& acc,
    u32 moves = 0) {
  float highest[C];
  UNROLL_FOR (int c = 0; c < C; c++) highest[c] = MINUS_INFINITY;
  find_max(slot, g, s, [&](int c, int, int) { return LATE_UNIT ? columns.unit_of(c) : 1.0f; }, highest);
  UNROLL_FOR (int c = 0; c < C; c++) {
    if (OUT_IN_PRODUCTS) highest[c] = fma_rn(highest[c], 1.0f / 1024, -40.0f);
    if (WIDE && highest[c] > acc.row_max[c] + RESCALE_THRESHOLD) moves |= 1u << c;
  }
  if (WIDE && !warp_any(moves)) return;
  UNROLL_FOR (int d = 4; d < 32; d <<= 1) moves |= shfl_xor(moves, d);
  UNROLL_FOR (int c = 0; c < C; c++)
    UNROLL_FOR (int d = 4; d < 32; d <<= 1) highest[c] = max_f32(highest[c], shfl_xor(highest[c], d));
  UNROLL_FOR (int c = 0; c < C; c++) {
    const float higher = moves >> c & 1 ? max_f32(highest[c], acc.row_max[c]) : acc.row_max[c];
    const float base = MAX_WITHOUT_UNIT ? columns.unit_of(c) : 1.0f;
    const float factor = acc.row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx((acc.row_max[c] - higher) * base);
    acc.row_max[c] = higher;
    acc.row_sum[c] = mul_rn(acc.row_sum[c], factor), acc.shift[c] = mul_rn(acc.shift[c], factor);
    UNROLL_FOR (int i = 0; i < Accumulator::SLICES; i++)
      UNROLL_FOR (int j = WIDE ? c % OWN : 0; j < OUT_NUMBERS; j += OWN) acc.out[c / OWN][i][j] *= factor;
  }
}

DEVICE float value_scale(const u8* slot, int g, int x, int r) {
  return scale_of(field_bits(slot + fields_of(x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS, g + 8 * r));
}

// Wide: replaces scores by probabilities times their values' scales.
DEVICE void exponentials(const u8* slot, const ColumnState& columns, int g, StepScores& s, Accumulator& acc) {
  UNROLL_FOR (int c = 0; c < C; c++) {
    const float base = LATE_UNIT ? columns.unit_of(c) : 1.0f;
    const float row_max = acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
    UNROLL_FOR (int x = 0; x < NT; x++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        s[c][x][r] =
            weigh(slot, base, row_max, value_scale(slot, g, x, r), g, x, r, s[c][x][r], acc.row_sum[c], acc.shift[c]);
  }
}

// Narrow bytes: raised exponents of probabilities relative to the current running maximum. Returns the columns whose
// maximum must be updated: an exponent is MOST_RAISED or more, or there is no maximum yet. Bits are compared:
// positive floats are ordered like their bits, and an integer maximum takes three operands.
DEVICE u32 raised_exponents(const ColumnState& columns, const StepScores& s, const Accumulator& acc,
    StepScores& exponents) {
  u32 moves = 0;
  UNROLL_FOR (int c = 0; c < C; c++) {
    i32 highest = 0;
    const float base = LATE_UNIT ? columns.unit_of(c) : 1.0f;
    const bool unseen = acc.row_max[c] == MINUS_INFINITY;
    const float row_max =
        MAX_WITHOUT_UNIT ? mul_rn(acc.row_max[c], base) : acc.row_max[c];  // rounded as in store_states
    const float raised = unseen ? RAISED_BY : RAISED_BY - row_max;
    UNROLL_FOR (int x = 0; x < NT; x++) {
      UNROLL_FOR (int r = 0; r < 2; r++) exponents[c][x][r] = fma_rn(s[c][x][r], base, raised);
      highest = max_i32(highest, max_i32((i32)as_bits(exponents[c][x][0]), (i32)as_bits(exponents[c][x][1])));
    }
    if (unseen || highest >= (i32)as_bits(MOST_RAISED)) moves |= 1u << c;
  }
  return moves;
}

// Replaces raised exponents by probabilities times their values' scales, in units of FIELD_UNIT / RAISED.
DEVICE void raised_exponentials(const u8* slot, int g, StepScores& s, Accumulator& acc) {
  UNROLL_FOR (int c = 0; c < C; c++) {
    float sum = -0.0f, shift = -0.0f;
    UNROLL_FOR (int x = 0; x < NT; x++) {
      const u8* fields = slot + fields_of(x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS;
      UNROLL_FOR (int r = 0; r < 2; r++) {
        const float e = exp2_approx(s[c][x][r]);
        sum += e;
        s[c][x][r] = e * small_scale_of(field_bits(fields, g + 8 * r));
        if (V_KIND == UNIFORM)
          shift = e > 0 ? fma_rn(e, zero_of(field_bits(fields + FIELD_STRIDE, g + 8 * r)), shift) : shift;
      }
    }
    acc.row_sum[c] += sum * (1.0f / RAISED), acc.shift[c] += shift * (1.0f / RAISED);
  }
}

// Narrow bytes: splits probabilities, relative to the largest of the step, into two unsigned bytes.
DEVICE void split_into_bytes(const StepScores& s, int n, Probabilities& w) {
  u32 bits_of_largest = as_bits(1e-33f);  // as in raised_exponents, numbers are compared by their bits
  UNROLL_FOR (int x = 0; x < NT; x++)
    bits_of_largest = max_u32(bits_of_largest, max_u32(as_bits(s[n][x][0]), as_bits(s[n][x][1])));
  UNROLL_FOR (int d = 4; d < 32; d <<= 1) bits_of_largest = max_u32(bits_of_largest, shfl_xor(bits_of_largest, d));
  const float largest = as_float(bits_of_largest);
  const float up = 65535.0f * rcp_approx(largest);
  w.fold[n] = largest * (FIELD_UNIT / RAISED / 65535.0f);
  u32 all = 0;
  UNROLL_FOR (int x = 0; x < NT; x++) {
    const u32 first = as_bits(fma_rn(s[n][x][0], up, 8388608.0f)), second = as_bits(fma_rn(s[n][x][1], up, 8388608.0f));
    all += first + second;
    w.p[n][x][0] = movmatrix_trans(prmt(first, second, 0x4051));  // high bytes, low bytes
  }
  w.offset[n] = 0;
  if (V_KIND == LLOYD) {          // subtracts the levels' offset in integers
    all -= 2 * NT * 0x4B000000u;  // the bits of 2^23, which each integer was added to
    UNROLL_FOR (int d = 4; d < 32; d <<= 1) all += shfl_xor(all, d);
    w.offset[n] = -(i32)((127 * all) >> 1);
  }
}

DEVICE void pack_probabilities(const StepScores& s, Probabilities& w) {
  UNROLL_FOR (int n = 0; n < NG; n++) {
    if (WIDE) {
      UNROLL_FOR (int x = 0; x < NT; x++)
        UNROLL_FOR (int r = 0; r < 2; r++)
          w.p[n][x][r] = movmatrix_trans(pack_f16x2(s[n * OWN][x][r], s[n * OWN + OWN - 1][x][r]));
    } else split_into_bytes(s, n, w);
  }
}

// Narrow halves: splits each probability, relative to the current running maximum, into two halves: the rounded value
// and the remainder. Returns the columns whose maximum must be updated, because a probability is
// 2^RESCALE_THRESHOLD or more. AGAIN: after the update, when columns without visible tokens still have no maximum.
template <bool AGAIN>
DEVICE u32 weigh_in_halves(const u8* slot, const ColumnState& columns, int g, const StepScores& s,
    const Accumulator& acc, Probabilities& w, float (&sum)[C], float (&shift)[C]) {
  u32 moves = 0;
  UNROLL_FOR (int c = 0; c < C; c++) {
    u32 largest = 0;
    const float row_max = AGAIN && acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
    sum[c] = acc.row_sum[c], shift[c] = acc.shift[c];
    UNROLL_FOR (int x = 0; x < NT; x++) {
      float p[2];
      UNROLL_FOR (int r = 0; r < 2; r++)
        p[r] = weigh(slot, LATE_UNIT ? columns.unit_of(c) : 1.0f, row_max, value_scale(slot, g, x, r), g, x, r,
            s[c][x][r], sum[c], shift[c]);
      const u32 high = pack_f16x2(p[0], p[1]),
                low = pack_f16x2(p[0] - f16_to_f32(high & 0xFFFF), p[1] - f16_to_f32(high >> 16));
      w.p[c][x][0] = movmatrix_trans(prmt(high, low, 0x5410)), w.p[c][x][1] = movmatrix_trans(prmt(high, low, 0x7632));
      largest = max_u16x2(largest, high);
    }
    if (exceeds_threshold(largest)) moves |= 1u << c;
  }
  return moves;
}

// From the scores of a step to the probability operand.
DEVICE void weigh_step(const u8* slot, const ColumnState& columns, int g, StepScores& s, Accumulator& acc,
    Probabilities& w) {
  if constexpr (!WIDE && !V_BYTES) {
    float sum[C], shift[C];
    const u32 moves = weigh_in_halves<false>(slot, columns, g, s, acc, w, sum, shift);
    if (warp_any(moves)) {
      update_max(slot, columns, g, s, acc, moves);
      weigh_in_halves<true>(slot, columns, g, s, acc, w, sum, shift);
    }
    UNROLL_FOR (int c = 0; c < C; c++) acc.row_sum[c] = sum[c], acc.shift[c] = shift[c];
  } else if constexpr (!WIDE) {
    StepScores p;
    const u32 moves = raised_exponents(columns, s, acc, p);
    if (warp_any(moves)) {
      update_max(slot, columns, g, s, acc, moves);
      raised_exponents(columns, s, acc, p);
    }
    raised_exponentials(slot, g, p, acc);
    pack_probabilities(p, w);
  } else {
    update_max(slot, columns, g, s, acc);
    exponentials(slot, columns, g, s, acc);
    pack_probabilities(s, w);
  }
}
