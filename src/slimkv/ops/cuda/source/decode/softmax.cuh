// From scores to the operand that multiplies values.
#pragma once
#include "decode/warp_state.cuh"

// Probabilities times their values' scales, as the products take them.
struct Probabilities {
  u32 p[NG][NT][2];  // bytes: one word, of tokens 2 t, 2 t + 8, 2 t + 1, 2 t + 9
  float fold[NG];  // bytes: what makes products with them numbers again
  u32 all[NG];     // bytes, Lloyd-Max: the sum of the probabilities
  i32 offset[NG];  // bytes: minus the levels' offset, 63.5, times that
};

// The running maximum moves rarely. Values as halves: of the score and the logarithm of the value's scale, so that their product
// stays within what halves hold. A field is about 1024 times that logarithm, plus 40.
DEVICE void find_highest(const u8* slot, const ColumnState& columns, int g, const StepScores& s, const TokenFields& tokens, float (&highest)[C]) {
  float magnitude[SCORED_TILES][2];
  if (OUT_IN_PRODUCTS)
#pragma unroll
    for (int x = 0; x < SCORED_TILES; x++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        magnitude[x][r] = (float)(i32)field_bits(slot + fields_of(TILES_APART * x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS, g + 8 * r);
#pragma unroll
  for (int c = 0; c < C; c++) {
#pragma unroll
    for (int x = 0; x < SCORED_TILES; x++)
#pragma unroll
      for (int r = 0; r < 2; r++)
      {
        const float base = LATE_UNIT ? 1024.0f * columns.unit_of(c) : TOKEN_UNITS ? 1024.0f * tokens.unit[x][r] : 1024.0f;
        highest[c] = max_f32(highest[c], OUT_IN_PRODUCTS ? fma_rn(s[c][x][r], base, magnitude[x][r]) : s[c][x][r]);
      }
  }
}

// A team has one reference; `real`: this warp has scores. `maxima`: of the team's warps, when it moves, where each will leave its
// state: other teams may have left theirs. ROLES: `factors` gets what the output is multiplied by. TILE_BY_TILE: `references` are those of
// the warp, for the columns of lanes t.
// Returns whether it moves.
DEVICE bool move_reference(const ColumnState& columns, int g, int t, float (&highest)[C], bool real, const Team& team, float* maxima, float* factors,
                           float* references, Accumulator& acc) {
  bool moves = false;
#pragma unroll
  for (int c = 0; c < C; c++) {
    if (TILE_BY_TILE) acc.row_max[c] = references[own_column(c, 0)];
    if (OUT_IN_PRODUCTS) highest[c] = fma_rn(highest[c], 1.0f / 1024, -40.0f);
    if (TEAM > 1 && !real) highest[c] = MINUS_INFINITY;
    moves = moves || highest[c] > acc.row_max[c] + columns.slack[c];
  }
  const bool any_moves = team.any(moves);
  if (any_moves) {
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) highest[c] = max_f32(highest[c], shfl_xor(highest[c], d));
      if (TEAM > 1 && g == 0) maxima[STATE_WORDS * ((team.number * TEAM + team.member) * COLUMNS + own_column(c, t))] = highest[c];
    }
    team.sync();
#pragma unroll
    for (int c = 0; c < C; c++) {
      float higher = max_f32(highest[c], acc.row_max[c]);
      if (TEAM > 1)
#pragma unroll
        for (int w = 0; w < TEAM; w++) higher = max_f32(higher, maxima[STATE_WORDS * ((team.number * TEAM + w) * COLUMNS + own_column(c, t))]);
      const float base = MAX_WITHOUT_UNIT ? columns.unit_of(c) : 1.0f;
      const float factor = acc.row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx((acc.row_max[c] - higher) * base);
      acc.row_max[c] = higher;
      if (TILE_BY_TILE && g == 0) references[own_column(c, 0)] = higher;
      acc.row_sum[c] *= factor, acc.shift[c] *= factor;
      if (ROLES) {
        if (team.member == 0 && g == 0) factors[own_column(c, t)] = factor;
        continue;
      }
#pragma unroll
      for (int i = 0; i < Accumulator::SLICES; i++)
#pragma unroll
        for (int j = WIDE ? c % OWN : 0; j < OUT_NUMBERS; j += OWN) acc.numbers(c / OWN, i)[j] *= factor;
    }
    if (TILE_BY_TILE) sync_warp();
  }
  return any_moves;
}
DEVICE bool update_max(const u8* slot, const ColumnState& columns, int g, int t, const StepScores& s, bool real, const Team& team,
                       float* maxima, float* factors, const TokenFields& tokens, Accumulator& acc) {
  float highest[C];
#pragma unroll
  for (int c = 0; c < C; c++) highest[c] = MINUS_INFINITY;
  find_highest(slot, columns, g, s, tokens, highest);
  return move_reference(columns, g, t, highest, real, team, maxima, factors, nullptr, acc);
}

// A score of column c to a probability times its value's scale, which is added to `sum` without that. ROLES: `known` is the scale.
DEVICE float weigh(const u8* slot, float base, float reference, float known, int g, int x, int r, float score, float& sum, float& shift) {
  const u8* fields = slot + fields_of(TILES_APART * x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS;
  const float e = exp2_approx(fma_rn(score, base, -reference));
  const float scale = ROLES ? known : scale_of(field_bits(fields, g + 8 * r));
  sum += e;
  if (V_KIND == UNIFORM) {
    const float zero = zero_of(field_bits(fields + FIELD_STRIDE, g + 8 * r));
    shift += e > 0 ? e * (zero - half_offset<V_KIND, V_BITS, true>() * scale) : 0;
  }
  return e * scale;
}

// Wide: scores to probabilities times their values' scales, which take their place.
DEVICE void exponentials(const u8* slot, const ColumnState& columns, int g, StepScores& s, Accumulator& acc) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    const float base = LATE_UNIT ? columns.unit_of(c) : 1.0f;
    const float reference = acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
#pragma unroll
    for (int x = 0; x < NT; x++)
#pragma unroll
      for (int r = 0; r < 2; r++) s[c][x][r] = weigh(slot, base, reference, 0, g, x, r, s[c][x][r], acc.row_sum[c], acc.shift[c]);
  }
}

// Narrow bytes: exponents of probabilities, raised, from the reference there is, whatever it is: they will be relative to the largest of the
// step. Returns whether it has to move: one of them is MOST_RAISED or more, or there is none yet. Numbers above zero are in the order of
// their bits, of which three are compared at once.
DEVICE bool raised_exponents(const ColumnState& columns, const StepScores& s, const Accumulator& acc, StepScores& exponents) {
  i32 highest = 0;
  bool none = false;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const float base = LATE_UNIT ? columns.unit_of(c) : 1.0f;
    const bool unseen = acc.row_max[c] == MINUS_INFINITY;
    const float reference = MAX_WITHOUT_UNIT ? mul_rn(acc.row_max[c], base) : acc.row_max[c];  // rounded, as the warps' maxima will be
    const float raised = unseen ? RAISED_BY : RAISED_BY - reference;
    none = none || unseen;
#pragma unroll
    for (int x = 0; x < NT; x++) {
#pragma unroll
      for (int r = 0; r < 2; r++) exponents[c][x][r] = fma_rn(s[c][x][r], base, raised);
      highest = max_i32(highest, max_i32((i32)as_bits(exponents[c][x][0]), (i32)as_bits(exponents[c][x][1])));
    }
  }
  return warp_any(none || highest >= (i32)as_bits(MOST_RAISED));
}

// Those to probabilities times their values' scales, in units of FIELD_UNIT / RAISED.
DEVICE void raised_exponentials(const u8* slot, int g, StepScores& s, Accumulator& acc) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    float sum = -0.0f, shift = -0.0f;
#pragma unroll
    for (int x = 0; x < NT; x++) {
      const u8* fields = slot + fields_of(x) + FIELD_STRIDE * K_NUMBER_OF_FIELDS;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float e = exp2_approx(s[c][x][r]);
        sum += e;
        s[c][x][r] = e * small_scale_of(field_bits(fields, g + 8 * r));
        if (V_KIND == UNIFORM) shift += e > 0 ? e * zero_of(field_bits(fields + FIELD_STRIDE, g + 8 * r)) : 0;
      }
    }
    acc.row_sum[c] += sum * (1.0f / RAISED), acc.shift[c] += shift * (1.0f / RAISED);
  }
}

// Narrow bytes: relative to the largest of the step, as two unsigned bytes.
DEVICE void split_into_bytes(const StepScores& s, int n, Probabilities& w) {
  u32 bits_of_largest = as_bits(1e-33f);  // numbers that are not negative are in the order of their bits, of which three are compared at once
#pragma unroll
  for (int x = 0; x < NT; x++) bits_of_largest = max_u32(bits_of_largest, max_u32(as_bits(s[n][x][0]), as_bits(s[n][x][1])));
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) bits_of_largest = max_u32(bits_of_largest, shfl_xor(bits_of_largest, d));
  const float largest = as_float(bits_of_largest);
  const float up = 65535.0f * rcp_approx(largest);
  w.fold[n] = largest * (FIELD_UNIT / RAISED / 65535.0f);
  u32 all = 0;
#pragma unroll
  for (int x = 0; x < NT; x++) {
    const u32 first = as_bits(s[n][x][0] * up + 8388608.0f), second = as_bits(s[n][x][1] * up + 8388608.0f);
    all += first + second;
    w.p[n][x][0] = movmatrix_trans(prmt(first, second, 0x4051));  // high bytes, low bytes
  }
  w.offset[n] = 0;
  if (V_KIND == LLOYD) {          // the levels' offset comes off in integers
    all -= 2 * NT * 0x4B000000u;  // what a float of 2^23 has above the integer
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) all += shfl_xor(all, d);
    w.all[n] = all;
    w.offset[n] = -(i32)((127 * all) >> 1);
  }
}

DEVICE void pack_probabilities(const StepScores& s, Probabilities& w) {
#pragma unroll
  for (int n = 0; n < NG; n++) {
    if (WIDE) {
#pragma unroll
      for (int x = 0; x < NT; x++)
#pragma unroll
        for (int r = 0; r < 2; r++) w.p[n][x][r] = movmatrix_trans(pack_f16x2(s[n * OWN][x][r], s[n * OWN + OWN - 1][x][r]));
    } else split_into_bytes(s, n, w);
  }
}

// Narrow halves: a probability is two of them, of which the second one is what the first one leaves. They are taken from the reference
// there is, as a warpgroup does; returns whether it has to move: one of them is 2^RESCALE_THRESHOLD or more. AGAIN: it has; a column that
// has seen nothing yet has none.
template <bool AGAIN>
DEVICE bool weigh_in_halves(const u8* slot, const ColumnState& columns, int g, const StepScores& s, const Accumulator& acc, Probabilities& w,
                            float (&sum)[C], float (&shift)[C]) {
  u32 largest = 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const float reference = AGAIN && acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
    sum[c] = acc.row_sum[c], shift[c] = acc.shift[c];
#pragma unroll
    for (int x = 0; x < NT; x++) {
      float p[2];
#pragma unroll
      for (int r = 0; r < 2; r++) p[r] = weigh(slot, LATE_UNIT ? columns.unit_of(c) : 1.0f, reference, 0, g, x, r, s[c][x][r], sum[c], shift[c]);
      const u32 high = pack_f16x2(p[0], p[1]), low = pack_f16x2(p[0] - f16_to_f32(high & 0xFFFF), p[1] - f16_to_f32(high >> 16));
      w.p[c][x][0] = movmatrix_trans(prmt(high, low, 0x5410)), w.p[c][x][1] = movmatrix_trans(prmt(high, low, 0x7632));
      largest = max_u16x2(largest, high);
    }
  }
  return largest >= 0x5C000000u || (largest & 0xFFFF) >= 0x5C00;  // infinity and not a number are more
}
