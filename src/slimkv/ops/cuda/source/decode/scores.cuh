// The scores of a step.
#pragma once
#include "decode/warp_state.cuh"

// cap tanh(s / cap) = cap - 2 cap / (e + 1), where e = exp(2 s / cap); `by` is 2 log2(e) / cap.
DEVICE float soft_cap(float s, float cap, float by) {
  const float e = exp2_approx(min_f32(s * by, 80.0f));
  return fma_rn(-2.0f * cap, rcp_approx(e + 1.0f), cap);
}

typedef Codes<K_BITS, KS, false> KeyCodes;

DEVICE void key_bytes(const KeyCodes& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<K_KIND, K_BITS, true>(codes.low(slice), codes.high(slice), table, first, second);
}

// Queries as two signed bytes times levels as bytes.
template <class PackedCodes>
DEVICE void multiply_key_bytes(const PackedCodes (&codes)[NT], const u8* shared, QueryOperands& queries, const LevelTables& tables,
                               int lane, StepScores& s) {
  i32 c[NT][NG][4];
#pragma unroll
  for (int i = 0; i < QI; i++) {
    queries.load_product(shared, i, lane);
#pragma unroll
    for (int x = 0; x < NT; x++) {
      u32 a[4] = {0, 0, 0, 0};
      if constexpr (K_SINGLE_BITS) key_bit_bytes<KS>(codes[x].first, i, a);
      else {
        key_bytes(codes[x], 2 * i, tables.key, a[0], a[1]);
        if (2 * i + 1 < KS) key_bytes(codes[x], 2 * i + 1, tables.key, a[2], a[3]);
      }
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const u32 b0 = queries.q[n][Q_IN_SHARED ? 0 : i][0], b1 = queries.q[n][Q_IN_SHARED ? 0 : i][1];
        if (i == 0) mma_u8_s8_from(c[x][n], a[0], a[1], a[2], a[3], b0, b1, 0, 0, 0, 0);
        else mma_u8_s8(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
  }
#pragma unroll
  for (int x = 0; x < NT; x++)
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) s[n][x][r] = (float)(128 * c[x][n][2 * r] + c[x][n][2 * r + 1]);
}

// The operand of a slice.
DEVICE void key_halves(const KeyCodes& codes, int slice, const LevelTables& tables, u32 (&a)[4]) {
  if constexpr (K_KIND == LLOYD && K_BITS > 5) joined_halves(codes, slice, tables.key_levels, a);
  else if constexpr (K_PERMUTED) denormal_halves<false>(codes.low(slice), tables.key, a);
  else if constexpr (K_IN_PAIRS) {
    u32 pair[4];
    pair_halves<false>(codes, slice, tables.key_levels, pair);
    a[0] = pair[0], a[1] = pair[2], a[2] = pair[1], a[3] = pair[3];
    if (WGMMA && K_BITS == 5) wgmma_fence_operand(a);  // signs are there before products begin, or each would wait for the one before
  } else code_halves<K_KIND, K_BITS, false>(codes.low(slice), codes.high(slice), tables.key, tables.key_levels, a);
}

// Queries as halves (narrow: two of them) times levels as halves.
DEVICE void multiply_key_halves(const KeyCodes (&codes)[NT], const u8* shared, QueryOperands& queries,
                                const LevelTables& tables, int lane, StepScores& s) {
  float c[NT][NG][4];
#pragma unroll
  for (int i = 0; i < QI; i++) {
    queries.load_product(shared, i, lane);
#pragma unroll
    for (int x = 0; x < NT; x++) {
      u32 a[4], upper[4];
      if constexpr (K_APART) apart_halves(codes[x], i, tables.key_levels, a, upper);
      else key_halves(codes[x], i, tables, a);
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const u32 b0 = queries.q[n][Q_IN_SHARED ? 0 : i][0], b1 = queries.q[n][Q_IN_SHARED ? 0 : i][1];
        if (i == 0) mma_f16_from_zero(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
        else mma_f16(c[x][n], a[0], a[1], a[2], a[3], b0, b1);
        if constexpr (K_APART) mma_f16(c[x][n], upper[0], upper[1], upper[2], upper[3], b0, b1);
      }
    }
  }
#pragma unroll
  for (int x = 0; x < NT; x++)
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < OWN; j++) s[n * OWN + j][x][r] = WIDE ? c[x][n][2 * r + j] : c[x][n][2 * r] + c[x][n][2 * r + 1];
}

// Sums of a warpgroup's products, when these have ended, as scores.
DEVICE void take_scores(float (&c)[SCORED_TILES][4 * NG], StepScores& s) {
#pragma unroll
  for (int x = 0; x < SCORED_TILES; x++) {
    wgmma_fence_operand(c[x]);
#pragma unroll
    for (int i = 0; i < 4 * NG; i++) s[2 * (i / 4) + i % 2][x][i / 2 % 2] = c[x][i];
  }
}

// A warpgroup's: the tiles of four warps are the rows of one product.
DEVICE void multiply_keys_of_warpgroup(const u8* slot, const u8* shared, const LevelTables& tables, int lane, StepScores& s) {
  constexpr int AT_ONCE = KS < 4 ? KS : 4, ROUNDS = (KS + AT_ONCE - 1) / AT_ONCE;  // slices
  const u64 queries = smem_descriptor(shared_address(shared + QUERY_AT), 16);
  KeyCodes codes[SCORED_TILES];
#pragma unroll
  for (int x = 0; x < SCORED_TILES; x++) codes[x].load(slot + keys_of(TILES_APART * x), lane);
  float c[SCORED_TILES][4 * NG];
#pragma unroll
  for (int x = 0; x < SCORED_TILES; x++)
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      u32 a[AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (round * AT_ONCE + i < KS) key_halves(codes[x], round * AT_ONCE + i, tables, a[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int slice = round * AT_ONCE + i;
        const u64 operand = descriptor_behind(queries, slice / 4 * OPERAND_BYTES + slice % 4 * 32);
        if (slice == 0) WarpgroupProduct::register_a<false>(c[x], a[i][0], a[i][1], a[i][2], a[i][3], operand);
        else if (slice < KS) WarpgroupProduct::register_a<true>(c[x], a[i][0], a[i][1], a[i][2], a[i][3], operand);
      }
      wgmma_commit();
      if (x + round) wgmma_wait<1>();
    }
  wgmma_wait<0>();
  take_scores(c, s);
}

// The same of a pair's step (ROLES): levels of the next slices are looked up while products of these are under way.
struct KeyOperands {
  static constexpr int AT_ONCE = KS > 1 ? 2 : 1, ROUNDS = (KS + AT_ONCE - 1) / AT_ONCE, ALL = SCORED_TILES * ROUNDS, BUFFERS = 3;  // slices
  KeyCodes codes[SCORED_TILES];
  u32 a[BUFFERS][AT_ONCE][4];

  DEVICE_MEMBER void look_up(int round, const LevelTables& tables) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (round % ROUNDS * AT_ONCE + i < KS) key_halves(codes[round / ROUNDS], round % ROUNDS * AT_ONCE + i, tables, a[round % BUFFERS][i]);
  }
  DEVICE_MEMBER void load(const u8* slot, const LevelTables& tables, int lane) {
#pragma unroll
    for (int x = 0; x < SCORED_TILES; x++) codes[x].load(slot + keys_of(TILES_APART * x), lane);
    look_up(0, tables);
  }
  DEVICE_MEMBER void multiply(const u8* shared, const LevelTables& tables, StepScores& s) {
    const u64 queries = smem_descriptor(shared_address(shared + QUERY_AT), 16);
    float c[SCORED_TILES][4 * NG];
#pragma unroll
    for (int round = 0; round < ALL; round++) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int x = round / ROUNDS, slice = round % ROUNDS * AT_ONCE + i;
        const u32(&operand)[4] = a[round % BUFFERS][i];
        const u64 query = descriptor_behind(queries, slice / 4 * OPERAND_BYTES + slice % 4 * 32);
        if (slice == 0) WarpgroupProduct::register_a<false>(c[x], operand[0], operand[1], operand[2], operand[3], query);
        else if (slice < KS) WarpgroupProduct::register_a<true>(c[x], operand[0], operand[1], operand[2], operand[3], query);
      }
      wgmma_commit();
      if (round + 1 < ALL) look_up(round + 1, tables);  // the round before last has ended
      if (round) wgmma_wait<1>();
    }
    wgmma_wait<0>();
    take_scores(c, s);
  }
};

DEVICE void multiply_keys(const u8* slot, const u8* shared, QueryOperands& queries, const LevelTables& tables, int lane,
                          StepScores& s) {
  if constexpr (WGMMA) return multiply_keys_of_warpgroup(slot, shared, tables, lane, s);
  KeyCodes codes[NT];
#pragma unroll
  for (int x = 0; x < NT; x++) codes[x].load(slot + keys_of(x), lane);
  if constexpr (K_BYTES) multiply_key_bytes(codes, shared, queries, tables, lane, s);
  else multiply_key_halves(codes, shared, queries, tables, lane, s);
}

// `slot`: behind it lie the fields of the lane's own tokens. `words`: so lie fields of the warp's tiles, a word of each lane.
DEVICE void load_token_fields(const u8* slot, const ColumnState& columns, TokenFields& tokens) {
#pragma unroll
  for (int x = 0; x < SCORED_TILES; x++) {
    const u8* fields = slot + fields_of(TILES_APART * x);
#pragma unroll
    for (int r = 0; r < 2; r++) {  // zero times minus infinity would not be a number
      tokens.unit[x][r] = TOKEN_UNITS ? max_f32(small_scale_of(field_bits(fields, 8 * r)) * columns.unit_of(0), 1e-37f) : 1.0f;
      tokens.scale[x][r] = scale_of(field_bits(fields + FIELD_STRIDE * K_NUMBER_OF_FIELDS, 8 * r));
    }
  }
}

// Takes the levels' offset off, multiplies by the keys' scales, adds their zeros.
DEVICE void scale_scores(const DecodeArgs& args, const u8* slot, const ColumnState& columns, int g, StepScores& s) {
  const float cap_by = SOFTCAP ? 2.0f * LOG2E * rcp_approx(args.softcap) : 0.0f;
  constexpr float KEY_OFFSET = K_SINGLE_BITS ? bit_unit<KS>() / 2 : K_BYTES ? (K_KIND == LLOYD ? 63.5f : 0.0f) : half_offset<K_KIND, K_BITS, false>();
#pragma unroll
  for (int x = 0; x < SCORED_TILES; x++) {
    const u8* fields = slot + fields_of(TILES_APART * x);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 field = field_bits(fields, g + 8 * r);
      const float scale = small_scale_of(field);
      const float zero = K_KIND == UNIFORM ? small_zero_of(field_bits(fields + FIELD_STRIDE, g + 8 * r)) : 0;
#pragma unroll
      for (int c = 0; c < C; c++) {
        float score = (KEY_OFFSET != 0 ? s[c][x][r] - KEY_OFFSET * columns.sum[c] : s[c][x][r]) * scale;
        if (K_KIND == UNIFORM) score += zero * columns.sum[c];
        if (!LATE_UNIT) score *= columns.unit_of(c);
        if (SOFTCAP) score = soft_cap(score, args.softcap, cap_by);
        s[c][x][r] = score;
      }
    }
  }
}

constexpr int NO_TOKEN = 1 << 30;  // beyond what anybody sees

// Of tokens that some column does not see, or that are marked.
DEVICE void hide_tokens(const u8* slot, const u8* shared, int token0, int lane, StepScores& s) {
  const int g = lane >> 2;
  u32 bad = 0;
#pragma unroll
  for (int i = 0; i < 2 * SCORED_TILES; i++) {
    const u8* fields = slot + fields_of(TILES_APART * (i / 2));
    const int token = g + 8 * (i & 1);
    if (field_bits(fields, token) == INVALID_FIELD || field_bits(fields + FIELD_STRIDE * K_NUMBER_OF_FIELDS, token) == INVALID_FIELD) bad |= 1u << i;
  }
#pragma unroll
  for (int c = 0; c < C; c++) {
    const Column* column = column_at(shared, own_column(c, lane & 3));
    const int begin = WINDOW ? column->visible_begin : 0, end = column->visible_end;
#pragma unroll
    for (int i = 0; i < 2 * SCORED_TILES; i++) {
      const int x = i / 2, r = i & 1, token = token0 + 16 * TILES_APART * x + g + 8 * r;
      if constexpr (ROLES) {  // where it is, so that steps without any move nothing
        if (bad >> i & 1) overwrite(s[c][x][r], NOT_A_NUMBER);
        if (token >= end || token < begin) overwrite(s[c][x][r], MINUS_INFINITY);
      } else s[c][x][r] = token >= end || token < begin ? MINUS_INFINITY : bad >> i & 1 ? NOT_A_NUMBER : s[c][x][r];
    }
  }
}

// Hidden and marked tokens; `clear`: none is hidden. One branch for the whole step, so that the rest of it is a single run of instructions.
DEVICE void apply_mask(const u8* slot, const u8* shared, int token0, bool clear, int lane, StepScores& s, u32& largest_fields) {
  if (clear) {
    constexpr int WORDS = FIELDS * FIELD_STRIDE / 4;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
      for (int i = 0; i < WORDS; i += 32)
        if (i + 32 <= WORDS || i + lane < WORDS)
          largest_fields = max_u16x2(largest_fields, *(const u32*)(slot + FIELDS_AT + 4 * (i + lane) + p * PIECE));
  } else hide_tokens(slot, shared, token0, lane, s);
}
