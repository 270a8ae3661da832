// The running softmax of the rows of a lane.
#pragma once
#include "prefill/work.cuh"

struct Softmax {
  float factor[2];  // of this lane's rows g and g + 8
  float row_max[2];  // the reference that exponents are taken from: score plus the exponent of the values' unit
  float row_sum[2];  // of this lane's share of the row, relative to it
  float rescale[2];  // what the output so far is to be multiplied by
  bool needs_rescale;  // some row of the warp

  // cap tanh(score / cap) = cap - 2 cap / (e + 1), where e = exp(2 score / cap). Then scores have their factor.
  DEVICE_MEMBER void cap(float (&s)[N], const TileScale& unit, float softcap) const {
    const float by = 2.0f * LOG2E * rcp_approx(softcap);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float e = exp2_approx(min_f32(s[i] * (factor[i / 2 % 2] * unit.key * by), 80.0f));
      s[i] = fma_rn(-2.0f * softcap, rcp_approx(e + 1.0f), softcap);
    }
  }

  // Scores to probabilities times the values' unit. The reference follows the maximum only when it has fallen behind by
  // RESCALE_THRESHOLD powers of two, so that the output is seldom rescaled.
  DEVICE_MEMBER void step(float (&s)[N], const TileScale& unit) {
    float most[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) most[r][0] = s[2 * r], most[r][1] = s[2 * r + 1];
#pragma unroll
    for (int i = 4; i < N; i++) most[i / 2 % 2][i % 2] = max_f32(most[i / 2 % 2][i % 2], s[i]);
    float by[2], shift[2];
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = max_f32(most[r][0], most[r][1]);
      m = max_f32(m, shfl_xor(m, 1));
      m = max_f32(m, shfl_xor(m, 2));
      by[r] = SOFTCAP ? 1.0f : max_f32(factor[r] * unit.key, 1e-30f);  // zero times minus infinity would not be a number
      const float wanted = m * by[r] + unit.value;
      const bool raise = wanted > row_max[r] + RESCALE_THRESHOLD;
      rescale[r] = raise ? exp2_approx(row_max[r] - wanted) : 1.0f;
      row_max[r] = raise ? wanted : row_max[r];
      behind = behind || raise;
      shift[r] = row_max[r] == MINUS_INFINITY ? 0.0f : unit.value - row_max[r];
    }
    needs_rescale = warp_any(behind);
    float sum[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < N; i++) {
      s[i] = exp2_approx(s[i] * by[i / 2 % 2] + shift[i / 2 % 2]);
      sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = row_sum[r] * rescale[r] + (sum[r][0] + sum[r][1]) * unit.value_inverse;
  }
};
