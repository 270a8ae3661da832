// Values times probabilities.
#pragma once
#include "decode/softmax.cuh"

constexpr int WHOLE_SLICES = V_PAIRED_TAIL ? VS - 1 : VS;
typedef Codes<V_BITS, WHOLE_SLICES, true> ValueCodes;
typedef Codes<V_BITS, VS, true, TEAM> PartCodes;  // those of a warp of a team

DEVICE void value_bytes(const ValueCodes& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<V_KIND, V_BITS, true>(codes.low(slice), codes.high(slice), table, first, second);
}

// Operands of pairs of tokens.
template <class C> DEVICE void value_halves(const C& codes, int slice, const LevelTables& tables, u32 (&a)[4]) {
  if constexpr (V_PERMUTED) denormal_halves<true>(codes.low(slice), tables.value, a);
  else if constexpr (V_IN_PAIRS) {
    pair_halves<true>(codes, slice, tables.value_levels, a);
    if (WGMMA && V_BITS == 5) wgmma_fence_operand(a);  // as of keys
  }
  else if constexpr (V_KIND == LLOYD && V_BITS > 5) joined_halves(codes, slice, tables.value_levels, a);
  else code_halves<V_KIND, V_BITS, true>(codes.low(slice), codes.high(slice), tables.value, tables.value_levels, a);
}

// What a slice's products add to the output of a step.
DEVICE void add_products(const i32 (&c)[NG][4], const Probabilities& w, int slice, Accumulator& acc) {
#pragma unroll
  for (int n = 0; n < NG; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) acc.numbers(n, slice)[j] += (float)(256 * c[n][2 * j] + (c[n][2 * j + 1] + w.offset[n])) * w.fold[n];
}

// The bytes of a word alternate between dimensions g and g + 8. They are put apart, and two tiles are one operand. Up to 4 bits codes are,
// before they are turned into bytes: then the tokens of both tiles alternate, and so do probabilities. `tail`: of the last slice, apart.
template <class PackedCodes>
DEVICE void add_merged_value_bytes(const PackedCodes (&codes)[NT], const u32 (&tail)[NT], const Probabilities& w, Table table, Accumulator& acc) {
  u32 b[NG][NT / 2][2];
  PackedCodes even[NT / 2], odd[NT / 2];
#pragma unroll
  for (int x = 0; x < NT; x += 2) {
    even[x / 2].template merge<false>(codes[x], codes[x + 1]), odd[x / 2].template merge<true>(codes[x], codes[x + 1]);
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) b[n][x / 2][r] = prmt(w.p[n][x][0], w.p[n][x + 1][0], r ? 0x7351 : 0x6240);
  }
#pragma unroll
  for (int i = 0; i < VS; i++) {
    i32 c[NG][4];
#pragma unroll
    for (int x = 0; x < NT / 2; x++) {
      u32 a0, a1, a2, a3;
      if (i < WHOLE_SLICES) {
        value_bytes(even[x], i, table, a0, a2);
        value_bytes(odd[x], i, table, a1, a3);
      } else {
        const u32 both = bit_select(0x0F0F0F0Fu, tail[2 * x], tail[2 * x + 1] << 4);
        code_bytes<V_KIND, V_BITS, true>(both & 0x33333333u, 0, table, a0, a2);
        code_bytes<V_KIND, V_BITS, true>(both >> 2 & 0x33333333u, 0, table, a1, a3);
      }
#pragma unroll
      for (int n = 0; n < NG; n++) {
        if (x == 0) mma_u8_u8_from(c[n], a0, a1, a2, a3, b[n][x][0], b[n][x][1], 0, 0, 0, 0);
        else mma_u8_u8(c[n], a0, a1, a2, a3, b[n][x][0], b[n][x][1]);
      }
    }
    add_products(c, w, i, acc);
  }
}

// The bytes of probabilities in the order of a value word's tokens.
DEVICE u32 in_token_order(u32 p) { return prmt(p, 0, 0x3120); }

// Others are put apart as bytes.
DEVICE void add_value_bytes_regrouped(const ValueCodes (&codes)[NT], const Probabilities& w, Table table, Accumulator& acc) {
  u32 b[NG][NT];
#pragma unroll
  for (int n = 0; n < NG; n++)
#pragma unroll
    for (int x = 0; x < NT; x++) b[n][x] = in_token_order(w.p[n][x][0]);
#pragma unroll
  for (int i = 0; i < VS; i++) {
    i32 c[NG][4];
#pragma unroll
    for (int x = 0; x < NT; x += 2) {
      u32 first, second, a0, a1, a2 = 0, a3 = 0;
      value_bytes(codes[x], i, table, first, second);
      a0 = prmt(first, second, 0x6420), a1 = prmt(first, second, 0x7531);
      if (x + 1 < NT) {
        value_bytes(codes[x + 1 < NT ? x + 1 : x], i, table, first, second);
        a2 = prmt(first, second, 0x6420), a3 = prmt(first, second, 0x7531);
      }
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const u32 b0 = b[n][x], b1 = x + 1 < NT ? b[n][x + 1 < NT ? x + 1 : x] : 0;
        if (x == 0) mma_u8_u8_from(c[n], a0, a1, a2, a3, b0, b1, 0, 0, 0, 0);
        else mma_u8_u8(c[n], a0, a1, a2, a3, b0, b1);
      }
    }
    add_products(c, w, i, acc);
  }
}

// Single bits: two tiles' words, as they lie, and as many numbers of slice i as there are bits of its word in a byte.
template <class PackedCodes>
DEVICE void add_value_bits(const PackedCodes (&codes)[NT], const Probabilities& w, Table table, Accumulator& acc) {
  u32 b[NG][NT];
  float fold[NG];
#pragma unroll
  for (int n = 0; n < NG; n++) {
    fold[n] = w.fold[n] * bit_step(table);
#pragma unroll
    for (int x = 0; x < NT; x++) b[n][x] = in_token_order(w.p[n][x][0]);
  }
#pragma unroll
  for (int i = 0; i < VS; i++) {
    i32 c[NG][4];
    const u32 mask = 0x01010101u << (i % 4);
#pragma unroll
    for (int x = 0; x < NT; x += 2) {
      const bool two = x + 1 < NT;
      const u32 first = codes[x].first.words[i / 4], second = two ? codes[two ? x + 1 : x].first.words[i / 4] : 0;
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const u32 b1 = two ? b[n][two ? x + 1 : x] : 0;
        if (x == 0) mma_u8_u8_from(c[n], first & mask, first & mask << 4, second & mask, second & mask << 4, b[n][x], b1, 0, 0, 0, 0);
        else mma_u8_u8(c[n], first & mask, first & mask << 4, second & mask, second & mask << 4, b[n][x], b1);
      }
    }
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 weight = 1u << (i % 4 + 4 * j), offset = weight * w.all[n] >> 1;
        acc.numbers(n, i)[j] += (float)(i32)(256u * (u32)c[n][2 * j] + (u32)c[n][2 * j + 1] - offset) * (fold[n] * (1.0f / weight));
      }
  }
}

// Here they are used as they lie, once with probabilities in the even bytes and once in the odd ones; two slices are one
// operand.
DEVICE void add_value_bytes_as_stored(const ValueCodes (&codes)[NT], const Probabilities& w, Table table, Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < VS; i += 2) {
    i32 even[NG][4], odd[NG][4];  // dimensions g of both slices, dimensions g + 8
#pragma unroll
    for (int x = 0; x < NT; x++) {
      u32 a0, a1 = 0, a2, a3 = 0;
      value_bytes(codes[x], i, table, a0, a2);
      if (i + 1 < VS) value_bytes(codes[x], i + 1, table, a1, a3);
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const u32 p = w.p[n][x][0], b0 = p & 0x00FF00FFu, b1 = prmt(p, 0, 0x4341), up0 = prmt(p, 0, 0x2404), up1 = p & 0xFF00FF00u;
        if (x == 0) {
          mma_u8_u8_from(even[n], a0, a1, a2, a3, b0, b1, 0, 0, 0, 0);
          mma_u8_u8_from(odd[n], a0, a1, a2, a3, up0, up1, 0, 0, 0, 0);
        } else {
          mma_u8_u8(even[n], a0, a1, a2, a3, b0, b1);
          mma_u8_u8(odd[n], a0, a1, a2, a3, up0, up1);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        if (i + j >= VS) continue;
        acc.numbers(n, i + j)[0] += (float)(256 * even[n][2 * j] + (even[n][2 * j + 1] + w.offset[n])) * w.fold[n];
        acc.numbers(n, i + j)[1] += (float)(256 * odd[n][2 * j] + (odd[n][2 * j + 1] + w.offset[n])) * w.fold[n];
      }
  }
}

DEVICE void add_value_halves(const ValueCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables,
                             Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < VS; i++)
#pragma unroll
    for (int x = 0; x < NT; x++) {
      u32 a[4], upper[4];
      if constexpr (V_APART) apart_halves(codes[x], i, tables.value_levels, a, upper);
      else value_halves(codes[x], i, tables, a);
#pragma unroll
      for (int n = 0; n < NG; n++) {
        mma_f16(acc.numbers(n, i), a[0], a[1], a[2], a[3], w.p[n][x][0], w.p[n][x][1]);
        if constexpr (V_APART) mma_f16(acc.numbers(n, i), upper[0], upper[1], upper[2], upper[3], w.p[n][x][0], w.p[n][x][1]);
      }
    }
}

// Narrow, values by pairs: dimensions g and g + 8 of a token. As above they are used as they lie; two slices are one operand,
// eight tokens a product.
template <class PairCodes>
DEVICE void add_value_pairs_as_stored(const PairCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables,
                                      Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < VS; i += 2)
#pragma unroll
    for (int x = 0; x < NT; x++) {
      u32 first[4], second[4] = {0, 0, 0, 0};
      pair_halves<false>(codes[x], i, tables.value_levels, first);
      if (i + 1 < VS) pair_halves<false>(codes[x], i + 1, tables.value_levels, second);
#pragma unroll
      for (int n = 0; n < NG; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const u32 p = w.p[n][x][r], a0 = first[2 * r], a1 = second[2 * r], a2 = first[2 * r + 1], a3 = second[2 * r + 1];
          mma_f16(acc.numbers(n, i), a0, a1, a2, a3, p & 0xFFFF, p >> 16);
          mma_f16(acc.numbers(n, i + 1), a0, a1, a2, a3, p << 16, p & 0xFFFF0000u);
        }
    }
}

// Wide, values by pairs, of two tiles at a time: a pair has a token of each, and so have probabilities.
template <class PairCodes>
DEVICE void add_merged_value_pairs(const PairCodes (&codes)[NT], const Probabilities& w, const LevelTables& tables, Accumulator& acc) {
#pragma unroll
  for (int x = 0; x < NT; x += 2) {
    u32 b[NG][4];
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        b[n][2 * r] = prmt(w.p[n][x][r], w.p[n][x + 1][r], 0x5410), b[n][2 * r + 1] = prmt(w.p[n][x][r], w.p[n][x + 1][r], 0x7632);
#pragma unroll
    for (int i = 0; i < VS; i++) {
      u32 even[4], odd[4];
      merged_pair_halves(codes[x], codes[x + 1], i, tables.value_levels, even, odd);
#pragma unroll
      for (int n = 0; n < NG; n++) {
        mma_f16(acc.numbers(n, i), even[0], odd[0], even[1], odd[1], b[n][0], b[n][1]);
        mma_f16(acc.numbers(n, i), even[2], odd[2], even[3], odd[3], b[n][2], b[n][3]);
      }
    }
  }
}

// What a warp leaves for its team.
DEVICE void publish(const Probabilities& w, u8* slot, int lane) {
#pragma unroll
  for (int n = 0; n < NG; n++)
#pragma unroll
    for (int x = 0; x < NT; x++) *(Words2*)(slot + weights_of(x) + 256 * n + 8 * lane) = {w.p[n][x][0], w.p[n][x][1]};
}

// Of a warpgroup: for every tile an operand with a row of 64 tokens, 16 of each warp, for every column. Probabilities are taken from
// the reference there is; `largest` shows, two halves at a time, whether it has to move. Four matrices at a time: both halves of
// a tile, of two groups or of two tiles. Sums are those of the step (ROLES), or go on from what there is.
struct Weighing {
  float reference[C], sum[C], shift[C];
  u32 largest;
};
template <int I, bool AGAIN> DEVICE void publish_pieces(u32 place, const StepScores& s, const u8* slot, const ColumnState& columns, const TokenFields& tokens,
                                            const float* references, int g, Weighing& w) {
  constexpr bool BY_GROUPS = NG > 1;
  constexpr int PER_TILE = BY_GROUPS ? (NG + 1) / 2 : 1, X = BY_GROUPS ? I / PER_TILE : 2 * I, N = BY_GROUPS ? 2 * (I % PER_TILE) : 0;
  constexpr bool ONE_GROUP = BY_GROUPS && N + 1 == NG;  // is left
  u32 word[4] = {0, 0, 0, 0};
  if (TILE_BY_TILE)
#pragma unroll
    for (int c = N * OWN; c < (ONE_GROUP ? N + 1 : N + 2) * OWN; c += OWN) {
      const Words2 two = *(const Words2*)(references + own_column(c, 0));
      const float first = as_float(two.x), second = as_float(two.y);
      w.reference[c] = AGAIN && first == MINUS_INFINITY ? 0.0f : first, w.reference[c + OWN - 1] = AGAIN && second == MINUS_INFINITY ? 0.0f : second;
    }
#pragma unroll
  for (int i = 0; i < (ONE_GROUP ? 2 : 4); i++) {
    const int n = BY_GROUPS ? N + i / 2 : 0, x = BY_GROUPS ? X : X + i / 2, r = i % 2;
    float p[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int c = n * OWN + j;
      const float base = LATE_UNIT ? columns.unit_of(c) : TOKEN_UNITS ? tokens.unit[x][r] : 1.0f;
      p[j] = weigh(slot, base, w.reference[c], ROLES ? tokens.scale[x][r] : 0, g, x, r, s[c][x][r], w.sum[c], w.shift[c]);
    }
    word[i] = pack_f16x2(p[0], p[OWN - 1]);
    w.largest = max_u16x2(w.largest, word[i]);
  }
  if constexpr (ONE_GROUP) stmatrix_x2_trans<X * OPERAND_BYTES + 1024 * N>(place, word[0], word[1]);
  else stmatrix_x4_trans<X * OPERAND_BYTES + 1024 * N>(place, word[0], word[1], word[2], word[3]);
  if constexpr (I + 1 < (BY_GROUPS ? SCORED_TILES * PER_TILE : SCORED_TILES / 2)) publish_pieces<I + 1, AGAIN>(place, s, slot, columns, tokens, references, g, w);
}

// Returns where a lane's part goes. AGAIN: the reference has moved; a column that has seen nothing yet has none.
template <bool AGAIN> DEVICE u32 begin_publishing(u8* weights, const Team& team, int lane, const Accumulator& acc, Weighing& w) {
  static_assert(!WGMMA || NG > 1 || SCORED_TILES % 2 == 0, "two groups or two tiles at a time");
  w.largest = 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
    if (!TILE_BY_TILE) w.reference[c] = AGAIN && acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
    w.sum[c] = ROLES ? -0.0f : acc.row_sum[c], w.shift[c] = ROLES ? -0.0f : acc.shift[c];
  }
  const int row = lane & 7, half = lane >> 3 & 1, second = lane >> 4;
  return shared_address(weights) + operand_place(row, 16 * team.member + 8 * half) + (NG > 1 ? 1024 : OPERAND_BYTES) * second;
}
DEVICE bool reference_is_behind(const Weighing& w) {
  return w.largest >= 0x5C000000u || (w.largest & 0xFFFF) >= 0x5C00;  // 2^RESCALE_THRESHOLD; infinity and not a number are more
}
// Returns whether the reference must move.
template <bool AGAIN>
DEVICE bool publish_to_warpgroup(const StepScores& s, const u8* slot, const ColumnState& columns, const TokenFields& tokens, u8* weights,
                                 const Team& team, int lane, const Accumulator& acc, Weighing& w) {
  const u32 place = begin_publishing<AGAIN>(weights, team, lane, acc, w);
  publish_pieces<0, AGAIN>(place, s, slot, columns, tokens, nullptr, lane >> 2, w);
  return reference_is_behind(w);
}

// This warp's part of the values of a step of the team: `count` of its warps have tokens.
DEVICE void add_values_of_team(const u8* slots, int count, const Team& team, const LevelTables& tables, int lane,
                               Accumulator& acc) {
#pragma unroll
  for (int w = 0; w < TEAM; w++) {
    if (w >= count) break;
    PartCodes codes[NT];
    PartCodes::load_parts<NT>(codes, [&](int x) { return slots + w * STAGES * SLOT + values_of(x); }, lane, team.member);
#pragma unroll
    for (int x = 0; x < NT; x++) {
      const u8* weights = slots + w * STAGES * SLOT + weights_of(x);
      Words2 p[NG];
#pragma unroll
      for (int n = 0; n < NG; n++) p[n] = *(const Words2*)(weights + 256 * n + 8 * lane);
#pragma unroll
      for (int i = 0; i < OUT_SLICES; i++) {
        u32 a[4];
        value_halves(codes[x], i, tables, a);
#pragma unroll
        for (int n = 0; n < NG; n++) mma_f16(acc.numbers(n, i), a[0], a[1], a[2], a[3], p[n].x, p[n].y);
      }
    }
  }
}

// The same by products of the warpgroup: a warp's slices are its part of the rows of so many products. Warps without tokens have
// probabilities of zero.
DEVICE void add_values_of_warpgroup(const u8* slots, const u8* operands, const Team& team, const LevelTables& tables, int lane, Accumulator& acc) {
  PartCodes codes[TEAM * NT];
  PartCodes::load_parts<TEAM * NT>(codes, [&](int i) { return slots + i / NT * STAGES * SLOT + values_of(i % NT); }, lane, team.member);
  constexpr int WANTED = (WARPS > 8 ? 4 : 8) / OUT_SLICES,  // products, for registers
                AT_ONCE = WANTED < 1 ? 1 : WANTED > TEAM * NT ? TEAM * NT : WANTED;  // tiles
  const u64 weights = smem_descriptor(shared_address(operands), 16);
#pragma unroll
  for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
#pragma unroll
  for (int first = 0; first < TEAM * NT; first += AT_ONCE) {
    u32 a[AT_ONCE][OUT_SLICES][4];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
      for (int i = 0; i < OUT_SLICES; i++) value_halves(codes[first + k], i, tables, a[k][i]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const u64 operand = descriptor_behind(weights, (first + k) % NT * OPERAND_BYTES + 32 * ((first + k) / NT));
#pragma unroll
      for (int i = 0; i < OUT_SLICES; i++)
        WarpgroupProduct::register_a(acc.products(i), a[k][i][0], a[k][i][1], a[k][i][2], a[k][i][3], operand);
    }
    wgmma_commit();
    if (first) wgmma_wait<1>();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
}

DEVICE void add_values(const u8* slot, const Probabilities& w, const LevelTables& tables, int lane, Accumulator& acc) {
  ValueCodes codes[NT];
  u32 tail[NT];
#pragma unroll
  for (int x = 0; x < NT; x++) {
    codes[x].load(slot + values_of(x), lane);
    tail[x] = V_PAIRED_TAIL ? value_rows_pairs(slot + values_of(x) + 32 * V_BITS * WHOLE_SLICES, lane) : 0;
  }
  if constexpr (V_SINGLE_BITS) add_value_bits(codes, w, tables.value, acc);
  else if constexpr (V_BYTES && V_REGROUPED && NT % 2 == 0 && ValueCodes::MERGEABLE) add_merged_value_bytes(codes, tail, w, tables.value, acc);
  else if constexpr (V_BYTES && V_REGROUPED) add_value_bytes_regrouped(codes, w, tables.value, acc);
  else if constexpr (V_BYTES) add_value_bytes_as_stored(codes, w, tables.value, acc);
  else if constexpr (V_IN_PAIRS && !WIDE) add_value_pairs_as_stored(codes, w, tables, acc);
  else if constexpr (V_IN_PAIRS && NT % 2 == 0) add_merged_value_pairs(codes, w, tables, acc);
  else add_value_halves(codes, w, tables, acc);
}
