// A team, the warps that share a step: the fields of their tokens, and their common running maximum.
#pragma once
#include "decode/softmax.cuh"

// The position of a warp: its pair of warpgroups (0 without warpgroups), and its index in the team.
struct TeamWarp {
  int pair, member;
  DEVICE_MEMBER void sync() const { sync_team(1 + pair, 32 * TEAM); }
  DEVICE_MEMBER bool any(bool p) const { return team_any(p, 1 + pair, 32 * TEAM); }
};

// The fields of a lane's tokens, for all columns: the unit of their scores (TOKEN_UNITS), their values' scales, and the
// maximum of some fields of the warp, two at a time.
struct TokenFields {
  float unit[SCORED_TILES][2], scale[SCORED_TILES][2];
  u32 largest;
};

// `slot`: offset so that fields_of addresses the fields of the lane's own tokens.
DEVICE void load_token_fields(const u8* slot, const ColumnState& columns, TokenFields& tokens) {
  UNROLL_FOR (int x = 0; x < SCORED_TILES; x++) {
    const u8* fields = slot + fields_of(TILES_APART * x);
    UNROLL_FOR (int r = 0; r < 2; r++) {  // zero times minus infinity would be NaN
      tokens.unit[x][r] =
          TOKEN_UNITS ? max_f32(small_scale_of(field_bits(fields, 8 * r)) * columns.unit_of(0), 1e-37f) : 1.0f;
      tokens.scale[x][r] = scale_of(field_bits(fields + FIELD_STRIDE * K_NUMBER_OF_FIELDS, 8 * r));
    }
  }
}

DEVICE void find_max(const u8* slot, int g, const StepScores& s, const TokenFields& tokens, float (&highest)[C]) {
  find_max(slot, g, s, [&](int, int x, int r) { return TOKEN_UNITS ? tokens.unit[x][r] : 1.0f; }, highest);
}

// Updates the running maximum of the team; returns whether it changed. `maxima`: memory to exchange the warps' maxima,
// where their states are stored later. `factors` receives the rescaling factors of the output.
DEVICE bool update_team_max(const ColumnState& columns, int g, int t, float (&highest)[C], const TeamWarp& warp,
    float* maxima, float* factors, RunningSoftmax& acc) {
  bool moves = false;
  UNROLL_FOR (int c = 0; c < C; c++) {
    highest[c] = fma_rn(highest[c], 1.0f / 1024, -40.0f);
    moves = moves || highest[c] > acc.row_max[c] + RESCALE_THRESHOLD;
  }
  const bool any_moves = warp.any(moves);
  if (any_moves) {
    UNROLL_FOR (int c = 0; c < C; c++) {
      UNROLL_FOR (int d = 4; d < 32; d <<= 1) highest[c] = max_f32(highest[c], shfl_xor(highest[c], d));
      if (g == 0) maxima[STATE_WORDS * ((warp.pair * TEAM + warp.member) * COLUMNS + own_column(c, t))] = highest[c];
    }
    warp.sync();
    UNROLL_FOR (int c = 0; c < C; c++) {
      float higher = max_f32(highest[c], acc.row_max[c]);
      UNROLL_FOR (int w = 0; w < TEAM; w++)
        higher = max_f32(higher, maxima[STATE_WORDS * ((warp.pair * TEAM + w) * COLUMNS + own_column(c, t))]);
      const float factor = acc.row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx(acc.row_max[c] - higher);
      acc.row_max[c] = higher;
      acc.row_sum[c] *= factor, acc.shift[c] *= factor;
      if (warp.member == 0 && g == 0) factors[own_column(c, t)] = factor;
    }
  }
  return any_moves;
}
