// Attention of few rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope parts, values from the same
// latents.
//
// A block has up to ROWS rows of a sequence and some of its tokens. Two pairs of warpgroups take turns with tiles of 64 tokens: the
// first of a pair unpacks a tile into shared memory, scaled, and the second multiplies. Scores are [tokens, rows] and output is
// [dimensions, rows], so that tokens and dimensions fill the 64 rows of `wgmma`, rows are its few columns, and a lane has the same
// rows in both. Latents are stored tokens x dimensions for scores; values read them transposed.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int PAIRS = 2, THREADS = 256 * PAIRS, STEP = 64, ITEM_COST = 6, PARTS = PAIRS;
#include "latent/merge.cuh"
#include "latent/producer.cuh"
#include "latent/queries.cuh"

constexpr int COLUMNS = ROWS / 4;  // of a lane: 8 j + 2 t and 8 j + 2 t + 1
constexpr int L_COPIES = 32, R_COPIES = 8;  // of a level, so that lanes seldom wait for one another
constexpr int PRODUCER_REGISTERS = 112, CONSUMER_REGISTERS = 144;
static_assert(ROWS == 8 || ROWS == 16, "rows");

constexpr int RING_AT = 0, QUERIES_AT = RING_AT + PAIRS * STAGE, QUERY_CHUNK = ROWS * 128;
constexpr int WEIGHTS_AT = QUERIES_AT + (CHUNKS + ROPE_CHUNKS) * QUERY_CHUNK, MOST_AT = WEIGHTS_AT + PAIRS * QUERY_CHUNK;
constexpr int ROWS_AT = MOST_AT + PAIRS * 16 * ROWS, UNITS_AT = ROWS_AT + 16 * ROWS, BARRIERS_AT = UNITS_AT + PAIRS * 64;
constexpr int L_LEVELS_AT = BARRIERS_AT + PAIRS * 16, R_LEVELS_AT = L_LEVELS_AT + 4 * L_COPIES * L_LEVELS;
constexpr int ALL = R_LEVELS_AT + 4 * R_COPIES * R_LEVELS;
static_assert(ALL == SHARED, "the launcher counts shared memory as this file does");
constexpr int CONSUMERS = PAIRS + 1;  // named barriers: one of each pair's consumers, and one of all

typedef float Scores[ROWS / 2];
typedef float Output[CHUNKS][ROWS / 2];
typedef WgmmaNarrow<ROWS, false> Halves;
typedef WgmmaNarrow<ROWS, BF16_ROPE> RopeNumbers;

// A warpgroup that multiplies. A warp has 16 tokens of a tile and 16 dimensions of every 64; a lane tokens or dimensions g, g + 8.
// What is known of its pair at compile time keeps operands' addresses out of registers.
template <int PAIR> struct Consumer {
  u8 *shared, *weights;
  float* most;  // [warp, row]
  const Row* rows;
  int warp, lane;
  float reference[COLUMNS], row_sum[COLUMNS];

  DEVICE_MEMBER static int row_of(int c, int t) { return 8 * (c / 2) + 2 * t + c % 2; }

  // s: products of latents; r: of rope parts.
  DEVICE_MEMBER void multiply_keys(Scores& s, Scores& r) const {
    const u64 keys = smem_descriptor(shared_address(shared + RING_AT) + PAIR * STAGE, 16);
    const u64 queries = smem_descriptor(shared_address(shared + QUERIES_AT), 16);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) s[i] = 0.0f, r[i] = 0.0f;
    wgmma_fence_operand(s), wgmma_fence_operand(r);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROPE_SLICES; k++)
      RopeNumbers::shared_a(r, keys + (((CHUNKS + k / 4) * CHUNK + k % 4 * 32) >> 4), queries + (((CHUNKS + k / 4) * QUERY_CHUNK + k % 4 * 32) >> 4));
#pragma unroll
    for (int k = 0; k < S; k++)
      Halves::shared_a(s, keys + ((k / 4 * CHUNK + k % 4 * 32) >> 4), queries + ((k / 4 * QUERY_CHUNK + k % 4 * 32) >> 4));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(s), wgmma_fence_operand(r);
  }

  // To scores, with the exponent of the unit of values, and the largest of this warp's tokens.
  DEVICE_MEMBER void score(Scores& s, const Scores& r, const Units& units, int token, bool clear) const {
    const int g = lane >> 2, t = lane & 3;
    float top[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const Row row = rows[row_of(c, t)];
      const float rope = units.rope * row.rope, unit = units.unit * row.unit;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = 4 * (c / 2) + 2 * i + c % 2;
        s[at] = (s[at] + r[at] * rope) * unit + units.exponent;
        if (!clear && token + g + 8 * i >= row.visible_end) s[at] = MINUS_INFINITY;
      }
      top[c] = max_f32(s[4 * (c / 2) + c % 2], s[4 * (c / 2) + 2 + c % 2]);
    }
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) top[c] = max_f32(top[c], shfl_xor(top[c], d));
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (g == 0) most[warp * ROWS + row_of(c, t)] = top[c];
  }

  // Scores to weights in halves [row, token]; the output so far to their reference.
  DEVICE_MEMBER void weigh(const Scores& s, const Units& units, Output& o) {
    const int g = lane >> 2, t = lane & 3;
    const float inverse = as_float(0x7F000000u - as_bits(units.unit));
    float by[COLUMNS], shift[COLUMNS];
    bool behind = false;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const float* all = most + row_of(c, t);
      const float wanted = max_f32(max_f32(all[0], all[ROWS]), max_f32(all[2 * ROWS], all[3 * ROWS]));
      const bool raise = wanted > reference[c] + RESCALE_THRESHOLD || (reference[c] == MINUS_INFINITY && wanted > MINUS_INFINITY);
      by[c] = raise ? exp2_approx(reference[c] - wanted) : 1.0f;
      reference[c] = raise ? wanted : reference[c];
      shift[c] = reference[c] == MINUS_INFINITY ? 0.0f : reference[c];
      behind = behind || raise;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j++) {
      float w[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int b = 0; b < 2; b++) w[i][b] = exp2_approx(s[4 * j + 2 * i + b] - shift[2 * j + b]);
        *(u32*)(weights + (8 * j + g) * 128 + (((2 * warp + i) ^ g) << 4) + 4 * t) = movmatrix_trans(pack_f16x2(w[i][0], w[i][1]));
      }
#pragma unroll
      for (int b = 0; b < 2; b++) row_sum[2 * j + b] = row_sum[2 * j + b] * by[2 * j + b] + (w[0][b] + w[1][b]) * inverse;
    }
    if (warp_any(behind)) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) o[chunk][i] *= by[2 * (i / 4) + i % 2];
    }
  }

  DEVICE_MEMBER void add_values(Output& o) const {
    const u64 values = smem_descriptor(shared_address(shared + RING_AT) + PAIR * STAGE, CHUNK);
    const u64 operand = smem_descriptor(shared_address(weights), 16);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) wgmma_fence_operand(o[chunk]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        Halves::transposed_a(o[chunk], values + ((chunk * CHUNK + k * 2048) >> 4), operand + (k * 32 >> 4));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) wgmma_fence_operand(o[chunk]);
  }

  DEVICE_MEMBER void sync() const { bar_sync(1 + PAIR, 128); }

  DEVICE_MEMBER void store(const LatentArgs& args, const Output& o, i64 part, int count) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) row_sum[c] += shfl_xor(row_sum[c], d);
      if (g == 0) most[warp * ROWS + row_of(c, t)] = row_sum[c];
    }
    sync();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int n = row_of(c, t);
      if (n >= count) continue;
      const float* all = most + n;
      if (warp == 0 && g == 0)
        args.states[2 * (part + n)] = reference[c], args.states[2 * (part + n) + 1] = (all[0] + all[ROWS]) + (all[2 * ROWS] + all[3 * ROWS]);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          args.parts[(part + n) * LD + place_of(64 * chunk + 16 * warp + g + 8 * i)] = o[chunk][4 * (c / 2) + 2 * i + c % 2] * L_UNIT;
    }
  }
};

template <int PAIR> DEVICE void attend_tiles(const LatentArgs& args, u8* shared, u64* full, u64* empty, int lane) {
  Consumer<PAIR> own;
  own.shared = shared, own.lane = lane, own.warp = shfl(thread_index() / 32 % 4, 0);
  own.weights = shared + WEIGHTS_AT + PAIR * QUERY_CHUNK, own.rows = (const Row*)(shared + ROWS_AT);
  own.most = (float*)(shared + MOST_AT) + PAIR * 4 * ROWS;
  u32 parity = 0;
  Walk walk(args, block_index(), lane);
  Range range;
  while (walk.next(args, range)) {
    const Item item(args, range.sequence, range.tile);
    const int last = min_i32(range.last, item.steps(args)), clear_end = item.visible_end(args, 0);
    bar_sync(CONSUMERS, 128 * PAIRS);  // nobody reads the queries before these
    for (int n = 4 * PAIR + own.warp; n < ROWS; n += 4 * PAIRS)
      stage_query<ROWS>(args, item, n, shared + QUERIES_AT, (Row*)(shared + ROWS_AT), lane);
    fence_proxy_async();
    bar_sync(CONSUMERS, 128 * PAIRS);
    Output o;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) own.reference[c] = MINUS_INFINITY, own.row_sum[c] = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) o[chunk][i] = 0.0f;

    for (int tile = range.first + PAIR; tile < last; tile += PAIRS, parity ^= 1) {
      Scores s, r;
      mbarrier_wait(full + PAIR, parity);
#ifdef ABLATE_PRODUCTS
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) s[i] = 0.0f, r[i] = 0.0f;
#else
      own.multiply_keys(s, r);
#endif
      const Units units = ((const Units*)(shared + UNITS_AT))[4 * PAIR + own.warp];
      own.score(s, r, units, tile * STEP + 16 * own.warp, (tile + 1) * STEP <= clear_end);
      own.sync();
      own.weigh(s, units, o);
      fence_proxy_async();
      own.sync();
#ifndef ABLATE_PRODUCTS
      own.add_values(o);
#endif
      if (lane == 0) mbarrier_arrive(empty + PAIR);
    }
    own.store(args, o, (i64)(range.part(args, block_index()) + PAIR) * ROWS, item.count);
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  const int lane = thread_index() & 31, warp = shfl(thread_index() / 32, 0);
  u64 *full = (u64*)(shared + BARRIERS_AT), *empty = full + PAIRS;
  fill_levels<L_LEVELS, L_COPIES, THREADS>(args.latent_levels, shared + L_LEVELS_AT);
  fill_levels<R_LEVELS, R_COPIES, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < PAIRS; i++) mbarrier_init(full + i, 4), mbarrier_init(empty + i, 4);
    fence_mbarrier_init();
  }
  pdl_wait();
  sync_threads();
  if (warp >= 4 * PAIRS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const LevelTable levels = {shared_address(shared + L_LEVELS_AT) + 4 * lane};
    const RopeLevels<R_COPIES> rope_levels = {shared_address(shared + R_LEVELS_AT) + 4 * (lane % R_COPIES)};
    const Producer<PAIRS, 1> producer(args, shared + RING_AT, (Units*)(shared + UNITS_AT), full, empty, warp / 4 - PAIRS, warp % 4, lane);
    producer.run(levels, rope_levels);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (warp < 4) attend_tiles<0>(args, shared, full, empty, lane);
    else attend_tiles<1>(args, shared, full, empty, lane);
  }
}
HOST_TESTABLE(attend, LatentArgs)
