// Attention of more than 16 query rows per KV head on packed pages with mma.sync, from sm_80 on
// (docs/design/kernels.md). A step has one tile for every warp of the thread block. A warp computes the scores of its
// tile and publishes its probabilities. Then it multiplies all probabilities of the step by its own slices of the
// values. So every code is unpacked once for all rows, from registers that were loaded during the previous step.
// Probabilities are double-buffered, so that warps synchronise once per step.
#define VERIFY 1
#define WARPGROUPS 0
#include "decode/merge.cuh"
#include "decode/scores.cuh"
#include "decode/values.cuh"
#include "decode/verify_output.cuh"
#include "decode/verify_queries.cuh"

// A warp's data of a step: the codes of its tile of keys and of its slices of all values in registers, and the fields
// of its tile in shared memory.
struct StepCodes : RangePages {
  static constexpr int PAGE_TILES = BLOCK_SIZE / 16;
  int warp, lane;
  i32 id;  // the page of tile `lane` of the next step to load
  int tile;  // that tile's number in the page
  u8* fields;  // fields of the warp's tile, double-buffered
  KeyCodes keys;
  PartCodes values[NT], next_values[NT];

  DEVICE_MEMBER void look_up(int step) {
    const int number = begin_tile + NT * step + lane % NT;
    id = ldg_i32(table + min_i32(number / PAGE_TILES, last_page));
    tile = number % PAGE_TILES;
  }
  DEVICE_MEMBER const u8* fields_of_step(u32 number) const { return fields + (number & 1) * STEP_FIELDS - FIELDS_AT; }

  // Loads step `number` of the range: everything at once, a whole step before values are needed. Loads share a
  // scoreboard, so waiting for one waits for all earlier ones.
  DEVICE_MEMBER void load(u32 number) {
    const u8* from = pages + shfl(id, warp) * page_stride;
    const int own = shfl(tile, warp), f = lane / 2;
    keys.load(from + own * K_TILE, lane);
    if (f < FIELDS)
      cp_async_16(fields + (number & 1) * STEP_FIELDS + f * FIELD_STRIDE + 16 * (lane % 2),
          from + field_offset(f) + 32 * own + 16 * (lane % 2));
    cp_async_commit();
    const i64 of_values = id * page_stride + (V_CODES + tile * V_TILE);
    UNROLL_FOR (int x = 0; x < NT; x++) {
      const u8* at = pages + shfl(of_values, x);
      PartCodes::load_parts<1>(next_values + x, [&](int) { return at; }, lane, warp);
    }
  }
  DEVICE_MEMBER void take_values() {
    UNROLL_FOR (int x = 0; x < NT; x++) values[x] = next_values[x];
  }
  // Prefetches a step to the L2 cache, one tile per warp.
  DEVICE_MEMBER void prefetch(int step) {
    look_up(step);
    const u8* from = pages + shfl(id, warp) * page_stride;
    const int own = shfl(tile, warp);
    for (int at = 128 * lane; at < K_TILE; at += 4096) prefetch_l2(from + own * K_TILE + at);
    for (int at = 128 * lane; at < V_TILE; at += 4096) prefetch_l2(from + V_CODES + own * V_TILE + at);
  }
};

// A lane's operand words for MMA i of PRODUCTS, for group n and, if it exists, n + 1.
template <int PRODUCTS>
DEVICE Words4 load_fragments(const u8* operands, int n, int i, int lane) {
  const u8* at = operands + fragment_offset<PRODUCTS>(n, i, lane);
  if (n + 1 < NG) return *(const Words4*)at;
  const Words2 one = *(const Words2*)at;
  return {one.x, one.y, 0, 0};
}

DEVICE void multiply_keys(const KeyCodes& codes, const u8* shared, const LevelTables& tables, int lane, StepScores& s) {
  float c[NG][4];
  UNROLL_FOR (int i = 0; i < KS; i++) {
    u32 a[4];
    key_halves(codes, i, tables, a);
    UNROLL_FOR (int n = 0; n < NG; n += 2) {
      const Words4 q = load_fragments<QI>(shared + QUERY_AT, n, i, lane);
      UNROLL_FOR (int k = n; k < n + 2 && k < NG; k++) {
        const u32 b0 = k > n ? q.z : q.x, b1 = k > n ? q.w : q.y;
        if (i == 0) mma_f16_from_zero(c[k], a[0], a[1], a[2], a[3], b0, b1);
        else mma_f16(c[k], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
  }
  UNROLL_FOR (int n = 0; n < NG; n++)
    UNROLL_FOR (int i = 0; i < 4; i++) s[2 * n + i % 2][0][i / 2] = c[n][i];
}

// The sums of a step, and its largest probabilities, as two halves.
struct StepSums {
  float sum[C], shift[C];
  u32 largest;
};
// Publishes probabilities times their values' scales to all warps, relative to the current running maximum. Returns
// whether that must be updated. AGAIN: after the update; columns without visible tokens still have no maximum.
template <bool AGAIN>
DEVICE bool publish(const StepScores& s, const u8* fields, const TokenFields& tokens, u8* operands, int tile, int lane,
    const RunningSoftmax& acc, StepSums& sums) {
  sums.largest = 0;
  u32 word[NG][2];
  UNROLL_FOR (int n = 0; n < NG; n++) {
    UNROLL_FOR (int j = 0; j < 2; j++) sums.sum[2 * n + j] = -0.0f, sums.shift[2 * n + j] = -0.0f;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      float p[2];
      UNROLL_FOR (int j = 0; j < 2; j++) {
        const int c = 2 * n + j;
        const float row_max = AGAIN && acc.row_max[c] == MINUS_INFINITY ? 0.0f : acc.row_max[c];
        p[j] = weigh(fields, TOKEN_UNITS ? tokens.unit[0][r] : 1.0f, row_max, tokens.scale[0][r], lane >> 2, 0, r,
            s[c][0][r], sums.sum[c], sums.shift[c]);
      }
      word[n][r] = pack_f16x2(p[0], p[1]);
      sums.largest = max_u16x2(sums.largest, word[n][r]);
      word[n][r] = movmatrix_trans(word[n][r]);
    }
    u8* const at = operands + fragment_offset<NT>(n / 2 * 2, tile, lane);
    if (n % 2) *(Words4*)at = {word[n - n % 2][0], word[n - n % 2][1], word[n][0], word[n][1]};
    else if (n + 1 == NG) *(Words2*)at = {word[n][0], word[n][1]};
  }
  return exceeds_threshold(sums.largest);
}

// Attention to all steps of a range.
DEVICE void attend_range(const DecodeArgs& args, const DecodeRange& range, u8* shared, const TeamWarp& warp,
    const ColumnState& columns, const LevelTables& tables, int lane, StepCodes& codes, RunningSoftmax& acc,
    TeamOutput& output) {
  const int g = lane >> 2, t = lane & 3;
  u32 taken = 0;
  for (int step = range.first; step < range.last; step++, taken++) {
    u8* operands = shared + PROBABILITIES_AT + (taken & 1) * PROBABILITY_BYTES;
    StepScores s;
    multiply_keys(codes.keys, shared, tables, lane, s);
    cp_async_wait<0>();
    sync_warp();
    codes.load(taken + 1);  // after the last step, loads it again: a branch would wait for the loads
    codes.look_up(min_i32(step + 2, range.last - 1));
    const u8* fields = codes.fields_of_step(taken);
    const int step_token = range.s.begin + step * STEP;
    TokenFields tokens;
    load_token_fields(fields + 2 * g, columns, tokens);
    if (!TOKEN_UNITS) scale_scores(args, fields, columns, g, s);
    if (step_token + STEP <= columns.clear_end && step_token >= columns.clear_begin) {
      if (lane < 8 * FIELDS)
        acc.largest_fields = max_u16x2(acc.largest_fields,
            *(const u32*)(fields + FIELDS_AT + FIELD_STRIDE * (lane / 8) + 4 * (lane % 8)));
    } else mask_tokens(fields, shared, step_token + 16 * warp.member, lane, s);

    StepSums sums;
    const bool moves = publish<false>(s, fields, tokens, operands, warp.member, lane, acc, sums);
    if (warp.any(moves)) {
      float highest[C], *factors = (float*)(shared + FACTORS_AT);
      UNROLL_FOR (int c = 0; c < C; c++) highest[c] = MINUS_INFINITY;
      find_max(fields, g, s, tokens, highest);
      const bool rescales = update_team_max(columns, g, t, highest, warp, (float*)(shared + STATE_AT), factors, acc);
      publish<true>(s, fields, tokens, operands, warp.member, lane, acc, sums);
      warp.sync();
      if (rescales)
        UNROLL_FOR (int c = 0; c < C; c++) {
          const float factor = factors[own_column(c, t)];
          UNROLL_FOR (int i = 0; i < OUT_SLICES; i++)
            output.out[i][c / 2][c % 2] *= factor, output.out[i][c / 2][2 + c % 2] *= factor;
        }
    }
    UNROLL_FOR (int c = 0; c < C; c++) acc.row_sum[c] += sums.sum[c], acc.shift[c] += sums.shift[c];

    UNROLL_FOR (int x = 0; x < NT; x++) {
      u32 a[OUT_SLICES][4];
      UNROLL_FOR (int i = 0; i < OUT_SLICES; i++) value_halves(codes.values[x], i, tables, a[i]);
      UNROLL_FOR (int n = 0; n < NG; n += 2) {
        const Words4 p = load_fragments<NT>(operands, n, x, lane);
        UNROLL_FOR (int i = 0; i < OUT_SLICES; i++) {
          mma_f16(output.out[i][n], a[i][0], a[i][1], a[i][2], a[i][3], p.x, p.y);
          if (n + 1 < NG) mma_f16(output.out[i][n + 1], a[i][0], a[i][1], a[i][2], a[i][3], p.z, p.w);
        }
      }
    }
    codes.take_values();
  }
  cp_async_wait<0>();  // the redundant copy, before fields are copied again
}

KERNEL(32 * WARPS, BLOCKS_PER_SM) attend(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31;
  pdl_wait();
  int left;
  WorkPartition partition;
  DecodeRange range(args, first_range(args, block_index(), args.blocks, lane, partition, left));
  if (left <= 0) return;
  const TeamWarp own = {0, warp};
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  StepCodes codes;
  codes.warp = warp, codes.lane = lane, codes.fields = shared + RINGS_AT + 32 * warp;
  const LevelTables tables = load_tables(args, shared, lane);
  while (true) {
    codes.open(args, range);
    UNROLL_FOR (int i = 0; i < QUERIES; i++) load_query(args, range, warp + i * WARPS, query[i], lane);
    codes.prefetch(range.first);  // only to L2, because queries need the registers
    prepare_queries(args, range, query, shared, warp, lane);
    codes.load(0);
    codes.take_values();
    codes.look_up(min_i32(range.first + 1, range.last - 1));
    sync_threads();
    RunningSoftmax acc;
    TeamOutput output;
    acc.clear(), output.clear();
    ColumnState columns;
    columns.load(args, range, shared, lane & 3);
    attend_range(args, range, shared, own, columns, tables, lane, codes, acc, output);
    sync_threads();  // states and results overwrite maxima and probabilities
    store_states(columns, acc, (float*)(shared + STATE_AT), warp, lane);
    sync_threads();
    store_results(output, own, shared, lane, false);
    left -= range.last - range.first + TILE_COST;  // and the cost of the next work tile
    sync_threads();
    write_rows(args, range, shared, warp, lane);
    if (left <= 0) return;
    range = DecodeRange(args, next_range(args, range, left));
    sync_threads();  // results and states have been read
  }
}
HOST_TESTABLE(attend, DecodeArgs)
