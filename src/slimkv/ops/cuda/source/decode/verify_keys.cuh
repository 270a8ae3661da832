// The key warpgroup: scores and probabilities.
#pragma once
#include "decode/verify_softmax.cuh"

// Signals that all probabilities of a step are published, and whether the output must be rescaled for them.
DEVICE void end_publishing(const PairMemory& memory, const TeamWarp& warp, int lane, u32 taken, bool rescales,
    const Weighing& weighing, RunningSoftmax& acc) {
  if (warp.member == 0 && lane == 0) {
    memory.factors_of(taken)[COLUMNS] = rescales ? 1.0f : 0.0f;
    mbarrier_arrive(memory.published + (taken & 1));
  }
  UNROLL_FOR (int c = 0; c < C; c++) acc.row_sum[c] += weighing.sum[c], acc.shift[c] += weighing.shift[c];
}

// Computes scores and probabilities of the pair's steps of a range. TILE_BY_TILE: registers hold the scores of one tile
// at a time. Steps that need a new maximum are outside of the inner loop, so that they take no registers from it.
DEVICE void attend_keys(const DecodeArgs& args, const DecodeRange& range, u8* shared, const PairMemory& memory,
    const TeamWarp& warp, const ColumnState& columns, const LevelTables& tables, int lane, u32& taken,
    RunningSoftmax& acc) {
  const int g = lane >> 2, t = lane & 3, key_offset = keys_of(warp.member),
            field_offset = fields_of(warp.member) - FIELDS_AT;
  // Fields of all tiles of the warp, a word per lane. in_register keeps the offsets from being recomputed in the loop.
  constexpr int WORDS = 8 * OWN_TILES * FIELDS;
  const auto word_offset = [&](int word) {
    return field_offset + fields_of(TILES_APART * (word / (8 * FIELDS))) + FIELD_STRIDE * (word / 8 % FIELDS) +
        4 * (word % 8);
  };
  const int own_fields = (int)in_register(field_offset + 2 * g, lane),
            own_word = (int)in_register(word_offset(WORDS < 32 ? lane % WORDS : lane), lane);
  KeyOperands keys;
  TokenFields tokens;
  StepScores s;
  Weighing weighing;
  int step = range.first + warp.pair;
  auto load_fields = [&](int x) {
    load_token_fields(memory.slot(taken) + own_fields + own_fields_offset(x), columns, tokens);
  };
  auto fields = [&](int x) { return memory.slot(taken) + field_offset + own_fields_offset(x); };
  auto load_keys = [&](int x) { keys.load(memory.slot(taken) + key_offset + keys_of(TILES_APART * x), tables, lane); };
  auto begin = [&] {
    memory.wait_for_copy(taken);
    const u8* slot = memory.slot(taken);
    load_keys(0);
    load_fields(0);
    tokens.largest = *(const u32*)(slot + own_word);
    UNROLL_FOR (int i = 32; i < WORDS; i += 32)
      if (i + 32 <= WORDS || i + lane < WORDS)
        tokens.largest = max_u16x2(tokens.largest, *(const u32*)(slot + word_offset(i + lane)));
  };
  auto score = [&](int x) {
    const int step_token = range.s.begin + step * STEP;
    keys.multiply(shared, tables, s);
    if (!TOKEN_UNITS) scale_scores(args, fields(x), columns, g, s);
    if (step_token + STEP <= columns.clear_end && step_token >= columns.clear_begin)
      acc.largest_fields = max_u16x2(acc.largest_fields, tokens.largest);
    else mask_tokens(fields(x), shared, step_token + 16 * (warp.member + TILES_APART * x), lane, s);
  };
  while (step < range.last) {
    // A step with its own maximum: the first one, and every one whose probabilities exceed the threshold.
    begin();
    float highest[C];
    UNROLL_FOR (int c = 0; c < C; c++) highest[c] = MINUS_INFINITY;
#pragma unroll 1
    for (int x = 0; x < OWN_TILES; x += SCORED_TILES) {
      if (x) load_keys(x), load_fields(x);
      score(x);
      find_max(fields(x), g, s, tokens, highest);
    }
    memory.wait_until_used(taken - 2);
    const bool rescales =
        update_team_max(columns, g, t, highest, warp, (float*)(shared + STATE_AT), memory.factors_of(taken), acc);
    u32 place = begin_publishing<true>(memory.probabilities_of(taken), warp, lane, acc, weighing);
#pragma unroll 1
    for (int x = 0; x < OWN_TILES; x += SCORED_TILES) {
      if (TILE_BY_TILE) load_keys(x), load_fields(x), score(x);
      publish_pieces<0>(place + x * OPERAND_BYTES, s, fields(x), tokens, g, weighing);
    }
    fence_proxy_async();  // before wgmma reads the probabilities
    warp.sync();
    end_publishing(memory, warp, lane, taken, rescales, weighing, acc);
    taken++, step += RINGS;
    for (; step < range.last; taken++, step += RINGS) {
      begin();
      UNROLL_FOR (int x = 0; x < OWN_TILES; x += SCORED_TILES) {
        if (x) load_fields(x);
        score(x);
        if (x + SCORED_TILES < OWN_TILES) load_keys(x + SCORED_TILES);
        if (x == 0) {
          memory.wait_until_used(taken - 2);
          place = begin_publishing<false>(memory.probabilities_of(taken), warp, lane, acc, weighing);
        }
        publish_pieces<0>(place + x * OPERAND_BYTES, s, fields(x), tokens, g, weighing);
      }
      fence_proxy_async();
      if (warp.any(exceeds_threshold(weighing.largest))) break;
      end_publishing(memory, warp, lane, taken, false, weighing, acc);
    }
  }
}
