// The online softmax of 16-bit prefill: from the scores of a tile to fp16 probabilities.
#pragma once
#include "prefill/work.cuh"

constexpr int OUTPUTS = PLACES / 2;

// The online softmax of a lane's rows.
//
// Values are fp16 in their tile's unit, a power of two. Probabilities are multiplied by the unit, and the running
// maximum includes it. The unit depends on the largest scale of the tile, including tokens that a row may not see.
// BY_ROW: exponents do not include the unit; the output is in units of the latest tile, and the factor to another
// tile's units is exact.
struct Softmax : RowState {  // row_max: score plus the exponent of the values' unit
  float rescale[2];  // the factors for the output so far
  float out_unit = 0.0f;  // BY_ROW: exponent of the output's unit

  DEVICE_MEMBER static float power(float exponent) { return as_float((u32)(127 + (int)exponent) << 23); }
  DEVICE_MEMBER static float exponent_of(const TileScale& unit) { return BY_ROW ? 0.0f : unit.value; }
  // The factor that turns the accumulators into sums of probabilities times values.
  DEVICE_MEMBER float output_factor() const { return BY_ROW ? power(out_unit) : 1.0f; }
  // BY_ROW: changes the output's unit to the tile's; returns whether they differed. `followed`: update_max set rescale.
  DEVICE_MEMBER bool move_unit(const TileScale& unit, bool followed) {
    if (!BY_ROW || unit.value == out_unit) return false;
    const float by = power(out_unit - unit.value);
    UNROLL_FOR (int r = 0; r < 2; r++) rescale[r] = followed ? rescale[r] * by : by;
    out_unit = unit.value;
    return true;
  }

  // The base-2 score of a product `s`, plus `from`.
  DEVICE_MEMBER float score(float s, int r, const TileScale& unit, float from, float softcap) const {
    return SOFTCAP ? capped(s, r, unit.key, softcap) + from : fma_rn(s, factor[r] * unit.key, from);
  }

  // Updates the running maximum of rows where it lags by RESCALE_THRESHOLD powers of two, so that the output is seldom
  // rescaled. Returns whether any row was updated.
  DEVICE_MEMBER bool update_max(const float (&s)[N], const TileScale& unit, const Visible& visible, int tile, int t,
      float softcap) {
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
    UNROLL_FOR (int i = 0; i < N; i++) {
      const float x = score(s[i], i / 2 % 2, unit, exponent_of(unit), softcap);
      most[i / 2 % 2] = max_f32(most[i / 2 % 2], visible.masks(tile * STEP, i, t) ? MINUS_INFINITY : x);
    }
    bool behind = false;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      const float m = quad_max(most[r]);
      const bool raise = m > row_max[r] + RESCALE_THRESHOLD;
      rescale[r] = raise ? exp2_approx(row_max[r] - m) : 1.0f;
      row_max[r] = raise ? m : row_max[r];
      behind = behind || raise;
    }
    return warp_any(behind);
  }

  // Probabilities times the values' unit, as fp16, and their sums. Returns whether one of the lane's is 2^8 or more, or
  // NaN. While a row has no running maximum, its unmasked probabilities are infinite or NaN.
  template <bool MASKED>
  DEVICE_MEMBER bool weigh(const float (&s)[N], const TileScale& unit, const Visible& visible, int tile, int t,
      float softcap, u32 (&p)[N / 2], float (&sum)[2]) const {
    const float from[2] = {exponent_of(unit) - row_max[0], exponent_of(unit) - row_max[1]};
    float sums[2][2] = {{0, 0}, {0, 0}};
    u32 large = 0;
    UNROLL_FOR (int i = 0; i < N; i += 2) {
      const int r = i / 2 % 2;
      float w[2];
      UNROLL_FOR (int k = 0; k < 2; k++) {
        w[k] = exp2_approx(score(s[i + k], r, unit, from[r], softcap));
        if (MASKED && visible.masks(tile * STEP, i + k, t)) w[k] = 0.0f;
        sums[r][k] += w[k];
      }
      p[i / 2] = pack_f16x2(w[0], w[1]);
      large |= p[i / 2] + 0x24002400u;  // sets the top bit of halves of 0x5C00 (2^8) or more
    }
    UNROLL_FOR (int r = 0; r < 2; r++) sum[r] = sums[r][0] + sums[r][1];
    return large & 0x80008000u;
  }

  // Turns finished products into probabilities and adds them to row sums. `follow_first`: updates the running maximum
  // even if no probability is too large. Returns whether the output must be rescaled.
  DEVICE_MEMBER bool take(const float (&s)[N], const TileScale& unit, const Visible& visible, int tile, bool clear,
      bool follow_first, int t, float softcap, u32 (&p)[N / 2]) {
    float sum[2];
    bool needs_rescale = false;
    auto weigh_tile = [&](bool masked) {
      return masked ? weigh<true>(s, unit, visible, tile, t, softcap, p, sum)
                    : weigh<false>(s, unit, visible, tile, t, softcap, p, sum);
    };
    if (follow_first || warp_any(weigh_tile(!clear))) {
      needs_rescale = update_max(s, unit, visible, tile, t, softcap);
      weigh<true>(s, unit, visible, tile, t, softcap, p, sum);
      if (needs_rescale) row_sum[0] = mul_rn(row_sum[0], rescale[0]), row_sum[1] = mul_rn(row_sum[1], rescale[1]);
    }
    UNROLL_FOR (int r = 0; r < 2; r++) row_sum[r] += BY_ROW ? sum[r] : sum[r] * unit.value_inverse;
    return move_unit(unit, needs_rescale) || needs_rescale;
  }
};
