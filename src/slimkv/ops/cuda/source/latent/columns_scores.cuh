// A score warpgroup of columns.cu: unpacks every other KV block and computes its probabilities. A warp has 16 tokens.
#pragma once
#include "latent/columns_shape.cuh"
#include "latent/columns_tokens.cuh"

// Slices that are unpacked while the products of as many others are in flight. Both have their own operand registers.
constexpr int AT_ONCE = 4, BUFFERS = 2;
typedef u32 Operand[AT_ONCE][4];

// Sums over lanes g = 0 to 7 of the N rows of lanes t: the row of sum i of lane 4 g + t, and the reduction.
constexpr int OWN_SUMS = (ROWS + 31) / 32;
DEVICE int row_of_sum(int i, int lane) {
  const int at = lane / 4 * OWN_SUMS + i;  // among a lane's rows
  return at / 2 * 8 + 2 * (lane & 3) + at % 2;
}
template <int N> DEVICE void add_over_lanes(float (&x)[N], int distance, int lane) {
  if constexpr (N > OWN_SUMS) {
    float kept[N / 2];
    const bool upper = lane & distance;
    UNROLL_FOR (int i = 0; i < N / 2; i++)
      kept[i] = (upper ? x[i + N / 2] : x[i]) + shfl_xor(upper ? x[i] : x[i + N / 2], distance);
    add_over_lanes(kept, distance / 2, lane);
    UNROLL_FOR (int i = 0; i < OWN_SUMS; i++) x[i] = kept[i];
  }
}

struct Scorer : Place {
  Table table;
  LevelTable levels;
  RopeLevels rope_levels;
  int clear_end;  // all rows see tokens before it
  u64 queries;  // a descriptor, rebuilt for every KV block so that it stays in uniform registers
  int generation;  // which maxima the sums are relative to
  float sums[OWN_SUMS];  // sums of probabilities of the lane's rows (row_of_sum)

  DEVICE_MEMBER void begin(int clear) {
    clear_end = clear, generation = 0;
    UNROLL_FOR (int i = 0; i < OWN_SUMS; i++) sums[i] = 0.0f;
  }

  // -- scores
  // Issues products of rope parts, which pass through the stage's rows before latents are written there.
  DEVICE_MEMBER void start_rope_scores(Scores& s, const PackedTokens& tokens, u32 rows) const {
    u32 a[ROPE_SLICES][4];
    const u32 to = rows + operand_row(lane);
    UNROLL_FOR (int k = 0; k < ROPE_SLICES; k++) store_rope(tokens.rope, k, table, rope_levels, rows, lane);
    sync_warp();
    UNROLL_FOR (int k = 0; k < ROPE_SLICES; k++) ldmatrix_x4(a[k], (to + k / 4 * CHUNK) ^ k % 4 * 32);
    sync_warp();
    wgmma_fence_operand(s);
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < ROPE_SLICES; k++) {
      const u64 query = advance_descriptor(queries, (CHUNKS + k / 4) * QUERY_CHUNK + k % 4 * 32);
      if (k == 0)
        WgmmaNarrow<ROWS, BF16_ROPE>::template register_a<false>(s, a[k][0], a[k][1], a[k][2], a[k][3], query);
      else WgmmaNarrow<ROWS, BF16_ROPE>::template register_a<true>(s, a[k][0], a[k][1], a[k][2], a[k][3], query);
    }
    wgmma_commit();
  }
  // Converts rope scores to units of the latents' scales.
  DEVICE_MEMBER void scale_rope_scores(Scores& s, const LaneScales& scales) const {
    wgmma_fence_operand(s);
    UNROLL_FOR (int i = 0; i < ROWS / 2; i++) {
      const float by = R_KIND == RAW ? scales[i / 2 % 2].inverse : scales[i / 2 % 2].rope;
      s[i] *= BF16_ROPE ? by : by * columns().rope[i / 4 * 8 + 2 * (lane & 3) + i % 2];
    }
    wgmma_fence_operand(s);
  }
  // Unpacks AT_ONCE slices to registers and to the stage; `start` issues their products.
  template <int FIRST> DEVICE_MEMBER void unpack(const PackedTokens& tokens, Operand& a, u32 row) const {
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
      const int k = FIRST + i;
      tokens.matrices(k, table, levels, a[i]);
      stmatrix_x4<FIRST / 4 * CHUNK>(row ^ k % 4 * 32, a[i][0], a[i][1], a[i][2], a[i][3]);
    }
  }
  template <int FIRST> DEVICE_MEMBER void start(Scores& s, const Operand& a) const {
    wgmma_fence();
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
      const int k = FIRST + i;
      WgmmaNarrow<ROWS, false>::template register_a<true>(s, a[i][0], a[i][1], a[i][2], a[i][3],
          advance_descriptor(queries, k / 4 * QUERY_CHUNK + k % 4 * 32));
    }
    wgmma_commit();
  }
  // Scores slices from FIRST on, while products of earlier ones may be in flight.
  template <int FIRST> DEVICE_MEMBER void scores_from(Scores& s, PackedTokens& tokens, const LaneScales& scales,
      u32 row, u32 turn, Operand (&a)[BUFFERS]) const {
    if constexpr (FIRST < LATENT_SLICES) {
      if (FIRST % 8 == 0 && FIRST > 0) mbarrier_wait(empty(group, FIRST / 8), turn);
      if (FIRST % OF_PART == 0) tokens.template load_part<FIRST / OF_PART + 1>(lane);
      Operand& own = a[FIRST / AT_ONCE % BUFFERS];
      unpack<FIRST>(tokens, own, row);
      if (FIRST == 0) {
        wgmma_wait<0>();
        scale_rope_scores(s, scales);
      }
      start<FIRST>(s, own);
      wgmma_wait<BUFFERS - 1>();  // before the next operand is overwritten
      scores_from<FIRST + AT_ONCE>(s, tokens, scales, row, turn, a);
    }
  }

  // -- softmax
  DEVICE_MEMBER Words4 pair_at(int j) const { return *(const Words4*)columns().pairs[4 * j + (lane & 3)]; }
  // Turns products into base-2 scores plus the logarithm of the token's scale, masked. Returns whether a maximum lags.
  DEVICE_MEMBER bool scale_scores(Scores& s, const LaneScales& scales, int token) const {
    const Columns& all = columns();
    UNROLL_FOR (int i = 0; i < ROWS / 2; i++)
      s[i] = s[i] * scales[i / 2 % 2].scale * all.pairs[i / 4 * 4 + (lane & 3)][i % 2] + scales[i / 2 % 2].log;
    if (token + KV_BLOCK > clear_end)
      UNROLL_FOR (int i = 0; i < ROWS / 2; i++)
        if (token + 16 * warp + lane / 4 + 8 * (i / 2 % 2) >= all.visible_end[i / 4 * 8 + 2 * (lane & 3) + i % 2])
          s[i] = MINUS_INFINITY;
    float most = LOWEST;
    UNROLL_FOR (int i = 0; i < ROWS / 2; i++) most = max_f32(most, s[i] - all.pairs[i / 4 * 4 + (lane & 3)][2 + i % 2]);
    return most > RESCALE_THRESHOLD;
  }
  // Rescales sums to the current maxima.
  DEVICE_MEMBER void catch_up() {
    Columns& all = columns();
    const int now = shfl(all.generation, 0);  // warp-uniform, so that descriptors stay in uniform registers
    if (generation == now) return;
    generation = now;
    UNROLL_FOR (int i = 0; i < OWN_SUMS; i++) {
      const int n = row_of_sum(i, lane);
      if (n < ROWS) sums[i] *= exp2_approx(all.seen[group][n] - all.row_max(n));
    }
    sync_team(SCORER + group, 128);
    const int n = 32 * warp + lane;
    if (n < ROWS) all.seen[group][n] = all.row_max(n);
  }
  // Called by a whole warpgroup: raises maxima that lag.
  DEVICE_MEMBER void raise(const Scores& s) {
    Columns& all = columns();
    UNROLL_FOR (int i = 0; i < ROWS / 4; i++) {
      const int at = i / 2 * 4 + i % 2;
      float most = max_f32(s[at], s[at + 2]);
      most = max_f32(most, shfl_xor(most, 4)), most = max_f32(most, shfl_xor(most, 8));
      most = max_f32(most, shfl_xor(most, 16));
      if (lane < 4) all.of_warp[4 * group + warp][i / 2 * 8 + 2 * lane + i % 2] = most;
    }
    sync_team(SCORER + group, 128);
    const int n = 32 * warp + lane;
    if (n < ROWS) {
      const float (&of)[8][ROWS] = all.of_warp;
      const float most =
          max_f32(max_f32(of[4 * group][n], of[4 * group + 1][n]), max_f32(of[4 * group + 2][n], of[4 * group + 3][n]));
      const float before = all.row_max(n);
      const bool behind = most > before + RESCALE_THRESHOLD;
      all.by[group][n] = behind ? exp2_approx(before - most) : 1.0f;
      if (behind) all.row_max(n) = most;
      if (n == 0) all.generation++;
    }
    sync_team(SCORER + group, 128);
    catch_up();
  }
  // Turns scores into fp16 probabilities times the tokens' scales, an operand in shared memory.
  DEVICE_MEMBER void softmax(Scores& s, const LaneScales& scales, int token) {
    catch_up();
    const bool raised = shfl((u32)team_any(scale_scores(s, scales, token), SCORER + group, 128), 0);
    if (raised) raise(s);
    if (warp == 0 && lane == 0) columns().raised[group] = raised;
    const u32 at = probabilities(group) + (lane & 7) * 128 + ((2 * warp + lane / 8 % 2 ^ (lane & 7)) << 4);
    float added[8 * OWN_SUMS];
    UNROLL_FOR (int i = ROWS / 4; i < 8 * OWN_SUMS; i++) added[i] = 0.0f;
    UNROLL_FOR (int j = 0; j < ROWS / 8; j++) {
      const Words4 pair = pair_at(j);
      float p[4];
      UNROLL_FOR (int i = 0; i < 4; i++) {
        p[i] = exp2_approx(s[4 * j + i] - as_float(i % 2 ? pair.w : pair.z));
        if (i / 2) added[2 * j + i % 2] += p[i] * scales[1].inverse;
        else added[2 * j + i % 2] = p[i] * scales[0].inverse;
      }
      stmatrix_x2_trans<0>(at + j * 1024, pack_f16x2(p[0], p[1]), pack_f16x2(p[2], p[3]));
    }
    add_over_lanes(added, 16, lane);
    UNROLL_FOR (int i = 0; i < OWN_SUMS; i++) sums[i] += added[i];
  }

  // Processes KV block i of `count` in the range, with first token `token`; `number` counts over all ranges. Calls
  // scored() to prefetch the next codes to L2 and, after the softmax, which loads would delay, done() to load them.
  template <class F, class G>
  DEVICE_MEMBER void attend(PackedTokens& tokens, int i, int count, int number, int token, const F& scored,
      const G& done) {
    const LaneScales scales = {{tokens.fields[0], tokens.rope_fields[0]}, {tokens.fields[1], tokens.rope_fields[1]}};
    const u32 rows = stage(group) + warp * 2048, turn = (u32)(number / STAGES & 1) ^ 1;
    Scores s;
    Operand a[BUFFERS];
    queries = smem_descriptor(shfl(shared_address(shared + QUERIES_AT), 0), 16);
    mbarrier_wait(empty(group, 0), turn);
    start_rope_scores(s, tokens, rows);
    scores_from<0>(s, tokens, scales, rows + operand_row(lane), turn, a);
    scored();
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    if (i > 0) bar_sync(TURN + group, 256);
    softmax(s, scales, token);
    done();
    sync_warp();
    if (lane == 0) mbarrier_arrive(full(group));
    if (i + 1 < count) bar_arrive(TURN + 1 - group, 256);
  }
  // The warp's first token of a range, and its page.
  DEVICE_MEMBER int first_token(int first, int before) const {
    return (first + ((before + group) & 1)) * KV_BLOCK + 16 * warp;
  }
  DEVICE_MEMBER i32 first_page(const LatentArgs& args, const WorkTile& tile, int first, int before) const {
    const i32* const pages = args.block_table + (i64)tile.sequence * args.table_stride;
    return ldg_i32(pages + max_i32(min_i32(first_token(first, before), tile.length - 1), 0) / BLOCK_SIZE);
  }
  // Processes every other KV block of a range, those with the warpgroup's parity.
  DEVICE_MEMBER void attend_range(const LatentArgs& args, const WorkTile& tile, int first, int count, int before) {
    int i = (before + group) & 1;
    if (i >= count) return;
    const i32* const pages = args.block_table + (i64)tile.sequence * args.table_stride;
    const int last = tile.length - 1;
    int token = (first + i) * KV_BLOCK + 16 * warp;  // the warp's first token
    auto page_of = [&](int at) { return ldg_i32(pages + min_i32(at, last) / BLOCK_SIZE); };
    PackedTokens tokens;
    tokens.load(args.pages + page_of(token) * args.page_stride, token % BLOCK_SIZE, lane);
    i32 next = page_of(token + 2 * KV_BLOCK);  // a load in flight
    for (; i < count; i += 2) {
      const int own = token - 16 * warp;
      token += 2 * KV_BLOCK;
      const i32 page = next;
      next = page_of(token + 2 * KV_BLOCK);
      auto from = [&] { return args.pages + page * args.page_stride; };
      attend(
          tokens, i, count, before + i, own, [&] { prefetch_tokens(from(), token % BLOCK_SIZE, lane); },
          [&] { tokens.load(from(), token % BLOCK_SIZE, lane); });
    }
  }
  // Called by both warpgroups: stores maxima and sums of a range. `unit` is overwritten with the factor that normalises
  // the output of a whole work tile.
  DEVICE_MEMBER void store_states(const Results& to) {
    bar_sync(SCORERS, 256);
    catch_up();
    Columns& all = columns();
    UNROLL_FOR (int i = 0; i < OWN_SUMS; i++)
      if (row_of_sum(i, lane) < ROWS) all.of_warp[4 * group + warp][row_of_sum(i, lane)] = sums[i];
    bar_sync(SCORERS, 256);
    const int n = 128 * group + 32 * warp + lane;
    if (n < ROWS) {
      float sum = 0.0f;
      UNROLL_FOR (int w = 0; w < 8; w++) sum += all.of_warp[w][n];
      all.unit(n) = to.factor(sum) * LEVEL_UNIT;
      if (n < to.tile.count) to.put_state(n, all.row_max(n) == LOWEST ? MINUS_INFINITY : all.row_max(n), sum);
    }
    if (to.whole) bar_arrive(SUMS, 512);
  }
};
