// From scores to probabilities: functions that all kernels share.
#pragma once
#include "decode/scores.cuh"

// The maximum of the scores, for the running maximum. With fp16 values (OUT_IN_PRODUCTS) it is the maximum of 1024
// times the score plus the bits of the value's scale, which are about 1024 * (log2(value scale) + 40), so that the
// probability times the scale stays within fp16's range. `unit(c, x, r)` turns a number of `s` into a score.
template <class Unit> DEVICE void find_max(const u8* slot, int g, const StepScores& s, const Unit& unit,
    float (&highest)[C]) {
  float magnitude[SCORED_TILES][2];
  if (OUT_IN_PRODUCTS)
    UNROLL_FOR (int x = 0; x < SCORED_TILES; x++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        magnitude[x][r] =
            (float)(i32)field_bits(slot + fields_of(TILES_APART * x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS, g + 8 * r);
  UNROLL_FOR (int c = 0; c < C; c++)
    UNROLL_FOR (int x = 0; x < SCORED_TILES; x++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        highest[c] = max_f32(highest[c],
            OUT_IN_PRODUCTS ? fma_rn(s[c][x][r], 1024.0f * unit(c, x, r), magnitude[x][r]) : s[c][x][r]);
}

// Returns the probability of a score times its value's scale, and adds the probability to `sum`.
DEVICE float weigh(const u8* slot, float base, float row_max, float scale, int g, int x, int r, float score, float& sum,
    float& shift) {
  const float e = exp2_approx(fma_rn(score, base, -row_max));
  sum += e;
  if (V_KIND == UNIFORM) {
    const u8* zeros = slot + fields_of(TILES_APART * x) + FIELD_STRIDE * (K_NUMBER_OF_FIELDS + 1);
    const float zero = fma_rn(-half_offset<V_KIND, V_BITS, true>(), scale, zero_of(field_bits(zeros, g + 8 * r)));
    shift = e > 0 ? fma_rn(e, zero, shift) : shift;
  }
  return mul_rn(e, scale);
}

// Whether one of two halves is 2^RESCALE_THRESHOLD or more, infinity or NaN.
DEVICE bool exceeds_threshold(u32 largest) { return largest >= 0x5C000000u || (largest & 0xFFFF) >= 0x5C00; }
