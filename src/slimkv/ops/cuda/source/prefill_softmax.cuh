// The running softmax of the rows of a lane.
#pragma once
#include "prefill_work.cuh"

struct Softmax {
  float factor[2];  // of this lane's rows g and g + 8
  float top[2];     // the reference that exponents are taken from: score plus the exponent of the values' unit
  float total[2];   // of this lane's share of the row, relative to it
  float fade[2];    // what the output so far is to be multiplied by
  bool fades;       // some row of the warp

  // Scores to probabilities times the values' unit. The reference follows the maximum only when it has fallen behind by
  // LAZY powers of two, so that the output is seldom rescaled.
  DEVICE_MEMBER void step(float (&s)[N], const Unit& unit) {
    float most[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) most[r][0] = s[2 * r], most[r][1] = s[2 * r + 1];
#pragma unroll
    for (int i = 4; i < N; i++) most[i / 2 % 2][i % 2] = maximum(most[i / 2 % 2][i % 2], s[i]);
    float by[2], shift[2];
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum(most[r][0], most[r][1]);
      m = maximum(m, shuffle_xor(m, 1));
      m = maximum(m, shuffle_xor(m, 2));
      by[r] = maximum(factor[r] * unit.key, 1e-30f);  // zero times minus infinity would not be a number
      const float wanted = m * by[r] + unit.value;
      const bool raise = wanted > top[r] + LAZY;
      fade[r] = raise ? exp2_fast(top[r] - wanted) : 1.0f;
      top[r] = raise ? wanted : top[r];
      behind = behind || raise;
      shift[r] = top[r] == MINUS_INFINITY ? 0.0f : unit.value - top[r];
    }
    fades = any_lane(behind);
    float sum[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < N; i++) {
      s[i] = exp2_fast(s[i] * by[i / 2 % 2] + shift[i / 2 % 2]);
      sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = total[r] * fade[r] + (sum[r][0] + sum[r][1]) * unit.value_inverse;
  }
};
