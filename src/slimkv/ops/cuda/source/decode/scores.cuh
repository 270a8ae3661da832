// Scores: the operands of keys, and the scaling and masking of products.
#pragma once
#include "decode/warp_state.cuh"

typedef Codes<K_BITS, KS, false> KeyCodes;

// The fp16 operand of a slice of keys.
DEVICE void key_halves(const KeyCodes& codes, int slice, const LevelTables& tables, u32 (&a)[4]) {
  if constexpr (K_PERMUTED) denormal_halves<false>(codes.low(slice), tables.key, a);
  else if constexpr (K_IN_PAIRS) {
    u32 pair[4];
    pair_halves<false>(codes, slice, tables.key_levels, pair);
    a[0] = pair[0], a[1] = pair[2], a[2] = pair[1], a[3] = pair[3];
    if (WARPGROUPS && K_BITS == 5)
      wgmma_fence_operand(a);  // applies the signs before the wgmmas, which would be serialised otherwise
  } else code_halves<K_KIND, K_BITS, false>(codes.low(slice), codes.high(slice), tables.key, tables.key_levels, a);
}

// Subtracts the levels' offset, multiplies by the keys' scales, adds their zeros.
DEVICE void scale_scores(const DecodeArgs& args, const u8* slot, const ColumnState& columns, int g, StepScores& s) {
  const float cap_by = SOFTCAP ? cap_factor(args.softcap) : 0.0f;
  constexpr float KEY_OFFSET = K_BYTES ? (K_KIND == LLOYD ? 63.5f : 0.0f) : half_offset<K_KIND, K_BITS, false>();
  UNROLL_FOR (int x = 0; x < SCORED_TILES; x++) {
    const u8* fields = slot + fields_of(TILES_APART * x);
    UNROLL_FOR (int r = 0; r < 2; r++) {
      const u32 field = field_bits(fields, g + 8 * r);
      const float scale = small_scale_of(field);
      const float zero = K_KIND == UNIFORM ? small_zero_of(field_bits(fields + FIELD_STRIDE, g + 8 * r)) : 0;
      UNROLL_FOR (int c = 0; c < C; c++) {
        float score = mul_rn(KEY_OFFSET != 0 ? fma_rn(-KEY_OFFSET, columns.sum[c], s[c][x][r]) : s[c][x][r], scale);
        if (K_KIND == UNIFORM) score = fma_rn(zero, columns.sum[c], score);
        if (!LATE_UNIT) score *= columns.unit_of(c);
        if (SOFTCAP) score = soft_cap((score + columns.shift[c]) * cap_by, args.softcap);
        s[c][x][r] = score;
      }
    }
  }
}

// Masks hidden tokens with minus infinity, and tokens marked as NaN with NaN.
DEVICE void mask_tokens(const u8* slot, const u8* shared, int token0, int lane, StepScores& s) {
  const int g = lane >> 2;
  u32 bad = 0;
  UNROLL_FOR (int i = 0; i < 2 * SCORED_TILES; i++) {
    const u8* fields = slot + fields_of(TILES_APART * (i / 2));
    const int token = g + 8 * (i & 1);
    if (field_bits(fields, token) == INVALID_FIELD ||
        field_bits(fields + FIELD_STRIDE * K_NUMBER_OF_FIELDS, token) == INVALID_FIELD)
      bad |= 1u << i;
  }
  UNROLL_FOR (int c = 0; c < C; c++) {
    const Column* column = column_at(shared, own_column(c, lane & 3));
    const int begin = WINDOW ? column->visible_begin : 0, end = column->visible_end;
    UNROLL_FOR (int i = 0; i < 2 * SCORED_TILES; i++) {
      const int x = i / 2, r = i & 1, token = token0 + 16 * TILES_APART * x + g + 8 * r;
      if constexpr (VERIFY) {  // in place, so that steps without masks move no registers
        if (bad >> i & 1) overwrite(s[c][x][r], NOT_A_NUMBER);
        if (token >= end || token < begin) overwrite(s[c][x][r], MINUS_INFINITY);
      } else s[c][x][r] = token >= end || token < begin ? MINUS_INFINITY : bad >> i & 1 ? NOT_A_NUMBER : s[c][x][r];
    }
  }
}
