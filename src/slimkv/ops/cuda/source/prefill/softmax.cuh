// The running softmax of the rows of a lane.
#pragma once
#include "prefill/work.cuh"

constexpr float MOST_WEIGHT = 8.0f, FRESH_WEIGHT = 6.0f;  // exponents of e4m3 weights: the most, and after a new reference

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

#if E4M3_VALUES
  // Scores to weights, at most 2^MOST_WEIGHT. The reference is an integer, which leaves mantissas as they are.
  DEVICE_MEMBER void step_e4m3(float (&s)[N], const u8* numbers, int t) {
    float by[2], shift[2];
    float most[2][2] = {{MINUS_INFINITY, MINUS_INFINITY}, {MINUS_INFINITY, MINUS_INFINITY}};
#pragma unroll
    for (int r = 0; r < 2; r++) by[r] = SOFTCAP ? 1.0f : max_f32(factor[r], 1e-30f);  // zero times minus infinity: not a number
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const Words4 words = *(const Words4*)(numbers + token_number_at(LOG_VALUE_SCALE, 16 * j + 4 * t));
      const float logs[4] = {as_float(words.x), as_float(words.y), as_float(words.z), as_float(words.w)};
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, r = i / 2 % 2;
        s[i] = fma_rn(s[i], by[r], logs[2 * (k / 4) + k % 2]);
        most[r][i % 2] = max_f32(most[r][i % 2], s[i]);
      }
    }
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = max_f32(most[r][0], most[r][1]);
      m = max_f32(m, shfl_xor(m, 1));
      m = max_f32(m, shfl_xor(m, 2));
      const bool raise = m > row_max[r] + MOST_WEIGHT;
      const float wanted = -floor_of(FRESH_WEIGHT - m);  // an integer, FRESH_WEIGHT below m or a little more
      rescale[r] = raise ? exp2_approx(row_max[r] - wanted) : 1.0f;
      row_max[r] = raise ? wanted : row_max[r];
      behind = behind || raise;
      shift[r] = row_max[r] == MINUS_INFINITY ? 0.0f : -row_max[r];
    }
    needs_rescale = warp_any(behind);
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = exp2_approx(s[i] + shift[i / 2 % 2]);
  }

  // Weights as e4m3, four in a word, in the order of the operand.
  DEVICE_MEMBER static void pack_e4m3(const float (&s)[N], u32 (&p)[N / 4]) {
#pragma unroll
    for (int i = 0; i < N; i += 8)
#pragma unroll
      for (int r = 0; r < 2; r++)
        p[i / 4 + r] = prmt(pack_e4m3x2(s[i + 2 * r], s[i + 2 * r + 1]), pack_e4m3x2(s[i + 4 + 2 * r], s[i + 5 + 2 * r]), 0x5410);
  }

  // What the products with a tile's digits add to the sums: those of the rounded weights, so that they sum to 1.
  DEVICE_MEMBER void add_sums(const float (&digits)[4], float inverse, int t) {
    const float first = t == 0 ? 1.0f : t == 1 ? 0.0009765625f : t == 2 ? 256.0f : 0.25f;
    const float second = t == 0 ? 0.03125f : t == 2 ? 8.0f : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = fma_rn(fma_rn(digits[2 * r], first, digits[2 * r + 1] * second), inverse, row_sum[r]);
  }
#endif
};
