// A warpgroup that unpacks tiles of 64 tokens, scores them and makes weights of the scores, for others that multiply values.
#pragma once
#include "common/hopper.cuh"
#include "latent/schedule.cuh"
#include "latent/tokens.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64, CHUNK = 64 * 128;  // bytes of 64 dimensions of 64 tokens or rows
constexpr int STAGE = CHUNKS * CHUNK, WEIGHTS = ROWS * 128;                      // weights: rows x tokens

// What scores of a row are multiplied by, and what is taken off them: the reference of its weights, or 0 where there is none.
struct __attribute__((aligned(8))) Column { float unit, shift; };

// What warpgroups tell one another.
struct __attribute__((aligned(16))) Board {
  Column columns[ROWS];
  float rope[ROWS];         // the unit of rope parts in units of latents
  i32 visible_ends[ROWS];
  float references[ROWS];
  float factors[STAGES][ROWS];  // what the output so far is multiplied by, if there is anything but ones
  float most[4][ROWS];
  i32 rescaled[4];
  u64 full[STAGES], empty[STAGES][2];  // empty: by halves of the dimensions
  Route routes[2];
};

constexpr int QUERIES_AT = 0, RING_AT = (CHUNKS + ROPE_CHUNKS) * CHUNK, WEIGHTS_AT = RING_AT + STAGES * STAGE;
constexpr int BOARD_AT = WEIGHTS_AT + STAGES * WEIGHTS, R_LEVELS_AT = BOARD_AT + (int)sizeof(Board);
static_assert(R_LEVELS_AT + 2 * R_LEVELS == SHARED, "the launcher counts shared memory as this file does");
constexpr int OF_VALUES = 1, QUERIES = 2, OF_SCORER = 3, ANY = 4;  // named barriers

#ifndef QCOUNT
#define QCOUNT 4
#define QTOGETHER 1
#endif
// Rows of a block, by warps `warp`, `warp` + WARPS, ...: 64 dimensions side by side, those of the rope part behind the latent's. Rows
// beyond the last are zeros and see nothing.
template <int WARPS> DEVICE void stage_queries(const LatentArgs& args, const Item& item, int warp, int lane, u8* shared, Board& board) {
  each_query<WARPS, QCOUNT, QTOGETHER>(args, item, warp, lane, [&](const Query& query, int n) {
    u8* const to = shared + QUERIES_AT;
    const u32 sign = args.scale < 0.0f ? 0x8000u : 0u;  // so that units are positive
    const float latent = query.latent_unit() * (LEVEL_UNIT / L_UNIT), ratio = query.rope_unit() * rcp_approx(latent);
    auto place = [&](int at) { return at / 64 * ROWS * 128 + n * 128 + ((at % 64 / 8 ^ (n & 7)) << 4) + at % 8 * 2; };
    query.latent_operand([&](int at, u32 bits) { *(u16*)(to + place(at)) = (u16)(bits ^ sign); },
                         [&](int at, u32 bits) { *(u32*)(to + place(at)) = bits ^ sign * 0x10001u; });
    query.rope_operand([&](int at, u32 bits) { *(u16*)(to + place(LD + rope_column(at))) = (u16)(bits ^ sign); }, ratio);
    if (lane == 0) board.columns[n] = {latent * as_float(as_bits(args.scale) & 0x7FFFFFFF), 0.0f}, board.rope[n] = ratio;
  });
  for (int n = 32 * warp + lane; n < ROWS; n += 32 * WARPS)
    board.references[n] = MINUS_INFINITY, board.visible_ends[n] = n < item.count ? item.visible_end(args, n) : 0;
}

template <int N> struct Number { static constexpr int VALUE = N; };
template <int I, class F> DEVICE void each_chunk(const F& f) {
  if constexpr (I < CHUNKS) {
    f(Number<I>());
    each_chunk<I + 1>(f);
  }
}

// Of a lane's tokens g and g + 8: see TokenScales.
struct LaneScales {
  float scale[2], inverse[2], log[2], rope[2];
  DEVICE_MEMBER void take(const u32 (&fields)[2], const u32 (&rope_fields)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool marked = fields[i] == INVALID_FIELD || rope_fields[i] == INVALID_FIELD;
      const float own = marked ? 1.0f : scale_of(fields[i]), rope_scale = marked || R_KIND == RAW ? 1.0f : scale_of(rope_fields[i]);
      const float least = max_f32(max_f32(own, rope_scale * 8.6736174e-19f), 8.6736174e-19f);  // 2^-60
      inverse[i] = rcp_approx(least), scale[i] = marked ? NOT_A_NUMBER : least, log[i] = log2_approx(least);
      rope[i] = rope_scale * inverse[i];
    }
  }
};

#ifndef TRACE
#define TRACE 0
#endif
#if TRACE
#define TICK(n) { const u32 now = clock_now(); ticks[n] += now - then; then = now; }
DEVICE u32 clock_now() { u32 r; asm volatile("mov.u32 %0, %%clock;" : "=r"(r) :: "memory"); return r; }
#define MARK(n) if (thread_index() % 128 == 0 && n < 24) ((u32*)(args.states + 2 * (args.sequences * args.row_tiles + args.blocks) * ROWS) + 64 * block_index())[16 + n] = clock_now();
#else
#define TICK(n)
#define MARK(n)
#endif
struct Scorer {
#if TRACE
  u32 ticks[14] = {}, then = clock_now();
  int mark = 2;
#endif
  const LatentArgs& args;
  u8* const shared;
  Board& board;
  const int warp, lane;
  float row_sum[16];  // of rows 8 j + 2 t and the next one, over the lane's tokens

  DEVICE_MEMBER Scorer(const LatentArgs& args_, u8* shared_, int warp_, int lane_)
      : args(args_), shared(shared_), board(*(Board*)(shared_ + BOARD_AT)), warp(warp_), lane(lane_) {}

  // Two columns side by side: rows 8 j + 2 t and the next one.
  DEVICE_MEMBER Words4 columns_of(int j) const { return *(const Words4*)(board.columns + 8 * j + 2 * (lane & 3)); }

  struct Reference { float of, shift, by; };
  // What follows when the largest score of row n is known.
  DEVICE_MEMBER Reference reference_of(int n) const {
    const float before = board.references[n];
    float wanted = board.most[0][n];
#pragma unroll
    for (int w = 1; w < 4; w++) wanted = max_f32(wanted, board.most[w][n]);
    wanted += board.columns[n].shift;
    const bool raise = wanted > before + RESCALE_THRESHOLD || (before == MINUS_INFINITY && wanted > MINUS_INFINITY);
    const float now = raise ? wanted : before;
    return {now, now == MINUS_INFINITY ? 0.0f : now, raise ? exp2_approx(before - wanted) : 1.0f};
  }
  // Scores are far above their rows' references: those follow. All warps come here.
  DEVICE_MEMBER void follow(float (&s)[32], int stage) {
    const int g = lane >> 2, t = lane & 3, thread = 32 * warp + lane;
#pragma unroll
    for (int c = 0; c < 16; c++) {
      float top = max_f32(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + 2 + c % 2]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) top = max_f32(top, shfl_xor(top, d));
      if (g == 0) board.most[warp][8 * (c / 2) + 2 * t + c % 2] = top;
    }
    bar_sync(OF_SCORER, 128);
#pragma unroll
    for (int c = 0; c < 16; c++) {
      const int n = 8 * (c / 2) + 2 * t + c % 2;
      const Reference reference = reference_of(n);
      const float off = reference.shift - board.columns[n].shift;
      row_sum[c] *= reference.by;
#pragma unroll
      for (int i = 0; i < 2; i++) s[c / 2 * 4 + 2 * i + c % 2] -= off;
    }
    const Reference own = thread < ROWS ? reference_of(thread) : Reference{0.0f, 0.0f, 0.0f};
    bar_sync(OF_SCORER, 128);
    if (thread < ROWS) board.references[thread] = own.of, board.columns[thread].shift = own.shift, board.factors[stage][thread] = own.by;
    bar_sync(OF_SCORER, 128);
  }

  // Products to weights in shared memory, which have the tokens' scales.
  DEVICE_MEMBER void weigh(float (&s)[32], const LaneScales& scales, int stage, int token, bool clear, bool first) {
    const int g = lane >> 2, t = lane & 3;
    float most = MINUS_INFINITY;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const Words4 columns = columns_of(j);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float unit = as_float(i % 2 ? columns.z : columns.x), shift = as_float(i % 2 ? columns.w : columns.y);
        s[4 * j + i] = s[4 * j + i] * (scales.scale[i / 2] * unit) + (scales.log[i / 2] - shift);
      }
    }
    if (!clear) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (token + g + 8 * (i / 2 % 2) >= board.visible_ends[8 * (i / 4) + 2 * t + i % 2]) s[i] = MINUS_INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) most = max_f32(most, s[i]);
    TICK(9)
    const bool behind = team_any(first || most > RESCALE_THRESHOLD, ANY, 128);
    if (behind) follow(s, stage);
    TICK(10)
    if (warp == 0 && lane == 0) board.rescaled[stage] = behind;
    const u32 row = shared_address(shared + WEIGHTS_AT) + stage * WEIGHTS + (lane / 16 * 8 + lane % 8) * 128 +
                    ((2 * warp + (lane / 8 & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 p[4];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const int at = 4 * (j + m / 2) + 2 * (m % 2), c = 2 * (j + m / 2);
        const float low = exp2_approx(s[at]), high = exp2_approx(s[at + 1]);
        row_sum[c] += low * scales.inverse[m % 2], row_sum[c + 1] += high * scales.inverse[m % 2];
        p[m] = pack_f16x2(low, high);
      }
      stmatrix_x4_trans<0>(row + j * 1024, p[0], p[1], p[2], p[3]);
    }
  }

  // Sums of weights and their references of an item, to memory.
  DEVICE_MEMBER void leave(const Item& item, int part) {
    const int g = lane >> 2, t = lane & 3, thread = 32 * warp + lane;
#pragma unroll
    for (int c = 0; c < 16; c++) {
      float sum = row_sum[c];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) sum += shfl_xor(sum, d);
      if (g == 0) board.most[warp][8 * (c / 2) + 2 * t + c % 2] = sum;
    }
    bar_sync(OF_SCORER, 128);
    if (thread < item.count) {
      float* const to = args.states + 2 * ((i64)part * ROWS + thread);
      float sum = board.most[0][thread];
#pragma unroll
      for (int w = 1; w < 4; w++) sum += board.most[w][thread];
      to[0] = board.references[thread], to[1] = sum;
    }
    bar_sync(OF_SCORER, 128);
  }

  DEVICE_MEMBER void run() {
    const LevelTable levels = {0};
    const PackedRopeLevels rope_levels = {shared_address(shared + R_LEVELS_AT)};
    const u64 queries = smem_descriptor(shared_address(shared + QUERIES_AT), 16);
    int number = 0;  // of the block's tiles
    Route* const route = board.routes + 1;
    MARK(1)
    if (warp == 0) {
      const Walk walk(args, block_index(), lane);
      if (lane == 0) route->walk = walk;
    }
    for (bool first_item = true;; first_item = false) {
      if (warp == 0 && lane == 0) route->go_on(args);
      bar_sync(OF_SCORER, 128);
      const Range range = route->common_range();
      bar_sync(OF_SCORER, 128);
      MARK(mark)
#if TRACE
      if (range.sequence < 0 && lane == 0 && warp == 0) {
        u32* const to = (u32*)(args.states + 2 * (args.sequences * args.row_tiles + args.blocks) * ROWS) + 64 * block_index();
        for (int i = 0; i < 14; i++) to[i] = ticks[i];
        to[14] = number;
      }
#endif
      if (range.sequence < 0) return;
      const Item item(args, range.sequence, range.tile);
      const int first = range.first, last = shfl(min_i32(range.last, item.steps(args)), 0), clear_end = item.visible_end(args, 0);
      const i32* table = args.block_table + (i64)item.sequence * args.table_stride;
      auto token_of = [&](int tile) { return tile * 64 + 16 * warp; };
      auto page_of = [&](int tile) { return token_of(tile) < item.length ? ldg_i32(table + token_of(tile) / BLOCK_SIZE) : 0; };
      auto prefetch = [&](i32 page, int tile) {
        Tokens::prefetch(args.pages + page * args.page_stride, token_of(tile) % BLOCK_SIZE, item.length - token_of(tile), lane);
      };
      Tokens tokens;
      i32 page = 0, ahead = 0, beyond = 0;  // of the next tile and of those after it: none is waited for
      if (first < last) {
        tokens.load(args.pages + page_of(first) * args.page_stride, token_of(first) % BLOCK_SIZE, item.length - token_of(first), lane);
        page = page_of(first + 1), ahead = page_of(first + 2), beyond = page_of(first + 3);
        if (first + 1 < last) prefetch(page, first + 1);
      }
      MARK(mark + 1)
      if (first_item) {
        bar_sync(QUERIES, 384);
      } else {
        stage_queries<4>(args, item, warp, lane, shared, board);
        fence_proxy_async();
        bar_sync(OF_SCORER, 128);
      }
#pragma unroll
      for (int c = 0; c < 16; c++) row_sum[c] = 0.0f;
      MARK(mark + 2)
#if TRACE
      then = clock_now();
#endif

      for (int tile = first; tile < last; tile++, number++) {
        const int stage = number % STAGES;
        const u32 turn = (u32)(number / STAGES & 1);
        if (tile + 2 < last) prefetch(ahead, tile + 2);
        const bool more = tile + 1 < last;
        const u8* const next_page = args.pages + page * args.page_stride;
        const int place = token_of(tile + 1) % BLOCK_SIZE, left = more ? item.length - token_of(tile + 1) : 0;
        page = ahead, ahead = beyond, beyond = page_of(tile + 4);
        TICK(0)
        LaneScales scales;
        scales.take(tokens.fields, tokens.rope_fields);
        float s[32];
        {
          u32 a[ROPE_SLICES][4];
#pragma unroll
          for (int k = 0; k < ROPE_SLICES; k++) tokens.rope.operand(k, args.table, rope_levels, a[k]);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < ROPE_SLICES; k++) {
            const u64 b = descriptor_behind(queries, (CHUNKS + k / 4) * CHUNK + k % 4 * 32);
            if (k) WgmmaNarrow<64, BF16_ROPE>::template register_a<true>(s, a[k][0], a[k][1], a[k][2], a[k][3], b);
            else WgmmaNarrow<64, BF16_ROPE>::template register_a<false>(s, a[k][0], a[k][1], a[k][2], a[k][3], b);
          }
          wgmma_commit();
        }
        TICK(1)
        mbarrier_wait(board.empty[stage], turn ^ 1);
        TICK(2)
        const u32 to = shared_address(shared + RING_AT) + stage * STAGE + warp * 2048 + Tokens::row_of(lane);
        each_chunk<0>([&](auto chunk_number) {
          constexpr int CHUNK_NUMBER = decltype(chunk_number)::VALUE;
          if (CHUNK_NUMBER == 1) TICK(3)
          if (CHUNK_NUMBER == CHUNKS / 2) {
            TICK(4)
            mbarrier_wait(board.empty[stage] + 1, turn ^ 1);
            TICK(5)
          }
          u32 a[4][4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int slice = 4 * CHUNK_NUMBER + i;
            level_matrices(tokens.latent.low(slice), L_BITS > 4 ? tokens.latent.high(slice) : 0, args.table, levels, a[i]);
            stmatrix_x4<CHUNK_NUMBER * CHUNK>(to ^ 32 * i, a[i][0], a[i][1], a[i][2], a[i][3]);
          }
          tokens.template load_chunk<CHUNK_NUMBER>(next_page, place, left, lane);
          if (CHUNK_NUMBER == 0) {  // the products of rope parts, in units of latents
            wgmma_wait<0>();
            wgmma_fence_operand(s);
#pragma unroll
            for (int i = 0; i < 32; i++)
              s[i] *= scales.rope[i / 2 % 2] * (BF16_ROPE ? 1.0f : board.rope[8 * (i / 4) + 2 * (lane & 3) + i % 2]);
            wgmma_fence_operand(s);
            tokens.load_rope(next_page, place, left, lane);
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; i++)
            WgmmaNarrow<64, false>::template register_a<true>(s, a[i][0], a[i][1], a[i][2], a[i][3],
                                                              descriptor_behind(queries, CHUNK_NUMBER * CHUNK + i * 32));
          wgmma_commit();
          if (CHUNK_NUMBER) wgmma_wait<1>();
        });
        TICK(6)
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        TICK(7)
        weigh(s, scales, stage, token_of(tile), (tile + 1) * STEP <= clear_end, tile == first);
        TICK(11)
        fence_proxy_async();
        TICK(12)
        sync_warp();
        if (lane == 0) mbarrier_arrive(board.full + stage);
      }
      MARK(mark + 3)
      leave(item, range.part(args, block_index()));
      MARK(mark + 4)
#if TRACE
      then = clock_now();
      mark += 5;
#endif
    }
  }
};
