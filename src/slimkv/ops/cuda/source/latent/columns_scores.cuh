// A warpgroup of columns.cu that unpacks every other KV block, scores it and makes probabilities. A warp has 16 tokens.
#pragma once
#include "latent/columns_shape.cuh"

// Of the lane's tokens g and g + 8: the scale of the latent, its reciprocal and base-2 logarithm, and the scale of the
// rope part in units of the latent's.
struct LaneScales {
  float scale[2], inverse[2], log[2], rope[2];

  DEVICE_MEMBER LaneScales(const Tokens& tokens) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const TokenScale own(tokens.fields[r], tokens.rope_fields[r]);
      scale[r] = own.scale, inverse[r] = own.inverse, log[r] = own.log, rope[r] = own.rope;
    }
  }
};

struct Scorer : Place {
  Table table;
  RopeLevels rope_levels;
  int clear_end;  // tokens before it are seen by all rows
  int generation;  // of the maxima that sums are relative to
  float sums[ROWS / 4];  // of probabilities, of the lane's rows

  DEVICE_MEMBER u64 queries_at(int bytes) const {
    return descriptor_behind(smem_descriptor(shared_address(shared + QUERIES_AT), 16), bytes);
  }
  DEVICE_MEMBER void begin(int clear) {
    clear_end = clear, generation = 0;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) sums[i] = 0.0f;
  }

  // -- scores
  // Starts products of rope parts, which pass through rows of the stage that latents are not in yet.
  DEVICE_MEMBER void start_rope_scores(Scores& s, const Tokens& tokens, u32 rows) const {
    u32 a[ROPE_SLICES][4];
    const u32 to = rows + (CHUNKS - ROPE_CHUNKS) * CHUNK + Tokens::row_of(lane);
#pragma unroll
    for (int k = 0; k < ROPE_SLICES; k++) {
      u32 v[4];
      tokens.rope.matrices(k, table, rope_levels, v);
      stmatrix_x4_trans<0>((to + k / 4 * CHUNK) ^ k % 4 * 32, v[0], v[2], v[1], v[3]);
    }
    sync_warp();
#pragma unroll
    for (int k = 0; k < ROPE_SLICES; k++) ldmatrix_x4(a[k], (to + k / 4 * CHUNK) ^ k % 4 * 32);
    sync_warp();
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROPE_SLICES; k++) {
      const u64 query = queries_at((CHUNKS + k / 4) * QUERY_CHUNK + k % 4 * 32);
      if (k == 0) WgmmaNarrow<ROWS, BF16_ROPE>::template register_a<false>(s, a[k][0], a[k][1], a[k][2], a[k][3], query);
      else WgmmaNarrow<ROWS, BF16_ROPE>::template register_a<true>(s, a[k][0], a[k][1], a[k][2], a[k][3], query);
    }
    wgmma_commit();
  }
  // Those in units of the latents' scales.
  DEVICE_MEMBER void scale_rope_scores(Scores& s, const LaneScales& scales) const {
    wgmma_fence_operand(s);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
      const float by = R_KIND == RAW ? scales.inverse[i / 2 % 2] : scales.rope[i / 2 % 2];
      s[i] *= BF16_ROPE ? by : by * columns().rope[i / 4 * 8 + 2 * (lane & 3) + i % 2];
    }
    wgmma_fence_operand(s);
  }
  // Levels of 64 dimensions, to registers and to the stage.
  template <int C> DEVICE_MEMBER void unpack_chunk(const Tokens& tokens, u32 (&a)[4][4], u32 row) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      level_matrices(tokens.latent.low(4 * C + k), L_BITS > 4 ? tokens.latent.high(4 * C + k) : 0, table, a[k]);
      stmatrix_x4<C * CHUNK>(row ^ k * 32, a[k][0], a[k][1], a[k][2], a[k][3]);
    }
  }
  template <int C> DEVICE_MEMBER void start_chunk(Scores& s, const u32 (&a)[4][4]) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      WgmmaNarrow<ROWS, false>::template register_a<true>(s, a[k][0], a[k][1], a[k][2], a[k][3],
          queries_at(C * QUERY_CHUNK + k * 32));
    wgmma_commit();
  }
  // Chunks from C on; the products of the one before it may still be under way.
  template <int C> DEVICE_MEMBER void chunks_from(Scores& s, const Tokens& tokens, const LaneScales& scales, u32 row,
      u32 (&a)[2][4][4]) const {
    if constexpr (C < CHUNKS) {
      unpack_chunk<C>(tokens, a[C % 2], row);
      if (C == 0) {
        wgmma_wait<0>();
        scale_rope_scores(s, scales);
      }
      start_chunk<C>(s, a[C % 2]);
      wgmma_wait<1>();  // before the operand of the chunk before is overwritten
      chunks_from<C + 1>(s, tokens, scales, row, a);
    }
  }

  // -- softmax
  DEVICE_MEMBER Words4 pair_at(int j) const { return *(const Words4*)columns().pairs[4 * j + (lane & 3)]; }
  // Products to base-2 scores plus the logarithm of the token's scale, masked. Whether a maximum is behind.
  DEVICE_MEMBER bool scale_scores(Scores& s, const LaneScales& scales, int token) const {
    const Columns& all = columns();
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
      s[i] = s[i] * scales.scale[i / 2 % 2] * all.pairs[i / 4 * 4 + (lane & 3)][i % 2] + scales.log[i / 2 % 2];
    if (token + KV_BLOCK > clear_end)
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++)
        if (token + 16 * warp + lane / 4 + 8 * (i / 2 % 2) >= all.visible_end[i / 4 * 8 + 2 * (lane & 3) + i % 2])
          s[i] = MINUS_INFINITY;
    float most = LOWEST;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) most = max_f32(most, s[i] - all.pairs[i / 4 * 4 + (lane & 3)][2 + i % 2]);
    return most > RESCALE_THRESHOLD;
  }
  // Sums relative to the maxima of now.
  DEVICE_MEMBER void catch_up() {
    Columns& all = columns();
    if (generation == all.generation) return;
    generation = all.generation;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
      const int n = i / 2 * 8 + 2 * (lane & 3) + i % 2;
      sums[i] *= exp2_approx(all.seen[group][n] - all.row_max(n));
    }
    sync_team(SCORER + group, 128);
    const int n = 32 * warp + lane;
    if (n < ROWS) all.seen[group][n] = all.row_max(n);
  }
  // Raises maxima that are behind; by a whole warpgroup.
  DEVICE_MEMBER void raise(const Scores& s) {
    Columns& all = columns();
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
      const int at = i / 2 * 4 + i % 2;
      float most = max_f32(s[at], s[at + 2]);
      most = max_f32(most, shfl_xor(most, 4)), most = max_f32(most, shfl_xor(most, 8));
      most = max_f32(most, shfl_xor(most, 16));
      if (lane < 4) all.of_warp[4 * group + warp][i / 2 * 8 + 2 * lane + i % 2] = most;
    }
    sync_team(SCORER + group, 128);
    const int n = 32 * warp + lane;
    if (n < ROWS) {
      const float(&of)[8][ROWS] = all.of_warp;
      const float most = max_f32(max_f32(of[4 * group][n], of[4 * group + 1][n]),
          max_f32(of[4 * group + 2][n], of[4 * group + 3][n]));
      const float before = all.row_max(n);
      const bool behind = most > before + RESCALE_THRESHOLD;
      all.by[group][n] = behind ? exp2_approx(before - most) : 1.0f;
      if (behind) all.row_max(n) = most;
      if (n == 0) all.generation++;
    }
    sync_team(SCORER + group, 128);
    catch_up();
  }
  // Scores to probabilities in halves, times the tokens' scales, as an operand in shared memory.
  DEVICE_MEMBER void softmax(Scores& s, const LaneScales& scales, int token) {
    catch_up();
    const bool raised = team_any(scale_scores(s, scales, token), SCORER + group, 128);
    if (raised) raise(s);
    if (warp == 0 && lane == 0) columns().raised[group] = raised;
    const u32 at = probabilities(group) + (lane & 7) * 128 + ((2 * warp + lane / 8 % 2 ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const Words4 pair = pair_at(j);
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        p[i] = exp2_approx(s[4 * j + i] - as_float(i % 2 ? pair.w : pair.z));
        sums[2 * j + i % 2] += p[i] * scales.inverse[i / 2];
      }
      stmatrix_x2_trans<0>(at + j * 1024, pack_f16x2(p[0], p[1]), pack_f16x2(p[2], p[3]));
    }
  }

  // KV block i of a range of `count`, whose first token is `token`; `number`: of all that this thread block had. Calls
  // next() when its codes are no longer needed.
  template <class F>
  DEVICE_MEMBER void attend(Tokens& tokens, int i, int count, int number, int token, const F& next) {
    const LaneScales scales(tokens);
    const u32 rows = stage(group) + warp * 2048;
    Scores s;
    u32 a[2][4][4];
    mbarrier_wait(empty(group), (u32)(number / STAGES & 1) ^ 1);
    start_rope_scores(s, tokens, rows);
    chunks_from<0>(s, tokens, scales, rows + Tokens::row_of(lane), a);
    next();
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    if (i > 0) bar_sync(TURN + group, 256);
    softmax(s, scales, token);
    sync_warp();
    if (lane == 0) mbarrier_arrive(full(group));
    if (i + 1 < count) bar_arrive(TURN + 1 - group, 256);
  }
  // KV blocks of a range: every other one from that on whose number is the warpgroup's.
  DEVICE_MEMBER void attend_range(const LatentArgs& args, const WorkTile& tile, int first, int count, int before) {
    const i32* pages = args.block_table + (i64)tile.sequence * args.table_stride;
    auto token_of = [&](int i) { return (first + i) * KV_BLOCK + 16 * warp; };
    auto page_of = [&](int i) { return token_of(i) < tile.length ? ldg_i32(pages + token_of(i) / BLOCK_SIZE) : 0; };
    Tokens tokens;
    auto load = [&](i32 page, int i) {
      tokens.load(args.pages + page * args.page_stride, token_of(i) % BLOCK_SIZE, tile.length - token_of(i), lane);
    };
    int i = (before + group) & 1;
    i32 page = 0, ahead = 0;  // of the own KV blocks to come: none is waited for
    if (i < count) {
      load(page_of(i), i);
      page = page_of(i + 2), ahead = page_of(i + 4);
    }
    for (; i < count; i += 2)
      attend(tokens, i, count, before + i, (first + i) * KV_BLOCK, [&] {
        if (i + 2 < count) {
          load(page, i + 2);
          page = ahead, ahead = page_of(i + 6);
        }
      });
  }
  // Maxima and sums of what this thread block has of a work tile, by both warpgroups.
  DEVICE_MEMBER void store_states(float* to, int count) {
    bar_sync(SCORERS, 256);
    catch_up();
    Columns& all = columns();
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
      float sum = sums[i];
      sum += shfl_xor(sum, 4), sum += shfl_xor(sum, 8), sum += shfl_xor(sum, 16);
      if (lane < 4) all.of_warp[4 * group + warp][i / 2 * 8 + 2 * lane + i % 2] = sum;
    }
    bar_sync(SCORERS, 256);
    const int n = 128 * group + 32 * warp + lane;
    if (n >= count) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += all.of_warp[w][n];
    to[2 * n] = all.row_max(n) == LOWEST ? MINUS_INFINITY : all.row_max(n), to[2 * n + 1] = sum;
  }
};
