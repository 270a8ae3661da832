// From a pair's scores to the probability operand of its value warpgroup.
#pragma once
#include "decode/verify_scores.cuh"

// The operand of a tile of each warp: a row of 64 tokens (16 per warp) for every column. Probabilities are relative to
// the running maximum (`row_max`); `largest`, two halves, shows whether it must be updated. stmatrix stores four
// matrices at a time: both halves of one tile for two groups, or of two tiles. Sums are those of the step.
struct Weighing {
  float row_max[C], sum[C], shift[C];
  u32 largest;
};
template <int I> DEVICE void publish_pieces(u32 place, const StepScores& s, const u8* slot, const TokenFields& tokens,
    int g, Weighing& w) {
  constexpr bool BY_GROUPS = NG > 1;
  constexpr int PER_TILE = BY_GROUPS ? (NG + 1) / 2 : 1, X = BY_GROUPS ? I / PER_TILE : 2 * I,
                N = BY_GROUPS ? 2 * (I % PER_TILE) : 0;
  constexpr bool ONE_GROUP = BY_GROUPS && N + 1 == NG;  // the last group of an odd number
  u32 word[4] = {0, 0, 0, 0};
  UNROLL_FOR (int i = 0; i < (ONE_GROUP ? 2 : 4); i++) {
    const int n = BY_GROUPS ? N + i / 2 : 0, x = BY_GROUPS ? X : X + i / 2, r = i % 2;
    float p[OWN];
    UNROLL_FOR (int j = 0; j < OWN; j++) {
      const int c = n * OWN + j;
      const float base = TOKEN_UNITS ? tokens.unit[x][r] : 1.0f;
      p[j] = weigh(slot, base, w.row_max[c], tokens.scale[x][r], g, x, r, s[c][x][r], w.sum[c], w.shift[c]);
    }
    word[i] = pack_f16x2(p[0], p[OWN - 1]);
    w.largest = max_u16x2(w.largest, word[i]);
  }
  if constexpr (ONE_GROUP) stmatrix_x2_trans<X * OPERAND_BYTES + 1024 * N>(place, word[0], word[1]);
  else stmatrix_x4_trans<X * OPERAND_BYTES + 1024 * N>(place, word[0], word[1], word[2], word[3]);
  if constexpr (I + 1 < (BY_GROUPS ? SCORED_TILES * PER_TILE : SCORED_TILES / 2))
    publish_pieces<I + 1>(place, s, slot, tokens, g, w);
}

// Returns the lane's store address. AGAIN: after an update; columns without visible tokens still have no maximum.
template <bool AGAIN> DEVICE u32 begin_publishing(u8* operands, const TeamWarp& warp, int lane,
    const RunningSoftmax& acc, Weighing& w) {
  static_assert(NG > 1 || SCORED_TILES % 2 == 0, "two groups or two tiles at a time");
  w.largest = 0;
  UNROLL_FOR (int c = 0; c < C; c++) {
    w.row_max[c] = AGAIN && acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
    w.sum[c] = -0.0f, w.shift[c] = -0.0f;
  }
  const int row = lane & 7, half = lane >> 3 & 1, second = lane >> 4;
  return shared_address(operands) + operand_place(row, 16 * warp.member + 8 * half) +
      (NG > 1 ? 1024 : OPERAND_BYTES) * second;
}
