// Attention of many query rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope parts,
// values from the same latents.
//
// A work tile has up to 64 rows of a sequence; KV blocks have 64 tokens. A producer warpgroup unpacks KV blocks into
// shared memory as levels, which fp16 represents exactly. The same levels serve scores (tokens x dimensions) and
// values, which `wgmma` reads transposed; scores and probabilities are multiplied by the tokens' scales. Each of two
// consumer warpgroups has half the dimensions of the output. They alternate in computing the scores of KV blocks, and
// exchange probabilities through shared memory.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int THREADS = 384, TILE_COST = 4;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/wide_consumer.cuh"

// With fewer registers for the consumers, the compiler serialises their wgmmas.
constexpr int PRODUCER_REGISTERS = 104, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
static_assert(ROWS == 64 && KV_BLOCK == 64, "operands");
static_assert(L_LEVELS == 0 && (HALF == 64 || HALF == 128 || HALF == 256), "latents that are not looked up");

// One warp: stages row n of a work tile. Rows beyond the last are zeros and see no tokens.
DEVICE void stage_query(const LatentArgs& args, const WorkTile& tile, const Query& query, int n, u8* shared) {
  const Units units = stage_operand(args, query, n, shared + QUERIES_AT, LEVEL_UNIT);
  if (query.lane == 0) {
    const int visible_end = query.real ? tile.visible_end(args, n) : 0;
    ((Row*)(shared + PROBABILITIES_AT))[n] = {units.latent, units.rope, visible_end, 0};
  }
}

// ---- results --------------------------------------------------------------------------------------------------------

// Stores 16 rows of a partial result, from row `first` on, multiplied by `by`.
DEVICE void store_part(const Results& to, const Output& o, int first, int dim, const float (&by)[2], int lane) {
  UNROLL_FOR (int r = 0; r < 2; r++) {
    const int n = first + lane / 4 + 8 * r;
    if (n >= to.tile.count) continue;
    UNROLL_FOR (int i = 0; i < HALF / 2; i += 8)
      to.put_part(to.row(n) + dim + 2 * i, lane & 3, pack_f16x2(o[i + 2 * r] * by[r], o[i + 2 * r + 1] * by[r]),
          pack_f16x2(o[i + 2 * r + 4] * by[r], o[i + 2 * r + 5] * by[r]));
  }
}

// Stores 16 rows of the output, from row `first` on, multiplied by `by`: through shared memory, in whole cache lines.
constexpr int PASS = 32,
              PITCH = 4 * PASS + 32;  // dimensions per pass, and bytes per row, padded against bank conflicts
static_assert(8 * 16 * PITCH <= STAGE, "queries leave room for passes of all warps");
DEVICE void store_rows(const Results& to, const Output& o, int first, int dim, const float (&by)[2], u8* scratch,
    int lane) {
  const int g = lane >> 2, t = lane & 3;
  const i64 at = to.row(first + lane / 8) + dim + lane % 8 * 4, apart = to.row(4) - to.row(0);
  UNROLL_FOR (int pass = 0; pass < HALF / PASS; pass++) {
    sync_warp();
    UNROLL_FOR (int j = 0; j < PASS / 8; j++)
      UNROLL_FOR (int r = 0; r < 2; r++) {
        const int i = PASS / 2 * pass + 4 * j + 2 * r;
        float* const row = (float*)(scratch + (g + 8 * r) * PITCH);
        const float low = o[i] * by[r], high = o[i + 1] * by[r];
        if (IN_BYTES) *(Words2*)(row + 8 * j + 2 * t) = {as_bits(low), as_bits(high)};
        else row[place_of(8 * j + 2 * t)] = low, row[place_of(8 * j + 2 * t + 1)] = high;
      }
    sync_warp();
    UNROLL_FOR (int k = 0; k < 4; k++) {
      const int n = 4 * k + lane / 8;
      const Words4 own = *(const Words4*)(scratch + n * PITCH + lane % 8 * 16);
      const float x[4] = {as_float(own.x), as_float(own.y), as_float(own.z), as_float(own.w)};
      if (first + n < to.tile.count) to.put_all(at + k * apart + PASS * pass, x);
    }
  }
}

// Stores the results of a range.
DEVICE void store_results(const Results& to, Consumer& own, const Output& o) {
  const int thread = thread_index() % 128, t = own.lane & 3;
  UNROLL_FOR (int r = 0; r < 2; r++)
    own.row_sum[r] += shfl_xor(own.row_sum[r], 1), own.row_sum[r] += shfl_xor(own.row_sum[r], 2);
  bar_sync(CONSUMERS, 256);
  float* sums = (float*)(own.shared + PROBABILITIES_AT) + 2 * thread;
  sums[256 * own.group] = own.row_sum[0], sums[256 * own.group + 1] = own.row_sum[1];
  bar_sync(CONSUMERS, 256);
  float by[2];
  UNROLL_FOR (int r = 0; r < 2; r++) {
    const int n = own.row_of(r);
    const float total = sums[r] + sums[256 + r];
    if (own.group == 0 && t == 0 && n < to.tile.count) to.put_state(n, own.row_max[r], total);
    by[r] = to.factor(total) * LEVEL_UNIT;
  }
  const int first = 16 * own.warp, dim = own.group * HALF;
  u8* const scratch =
      own.shared + QUERIES_AT + (4 * own.group + own.warp) * 16 * PITCH;  // no more scores read the queries
  if (to.whole) store_rows(to, o, first, dim, by, scratch, own.lane);
  else store_part(to, o, first, dim, by, own.lane);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

DEVICE void attend_ranges(const LatentArgs& args, u8* shared, u64* full, u64* empty, int group, int lane) {
  Consumer own;
  own.shared = shared, own.full = full, own.empty = empty;
  own.group = group, own.warp = shfl(thread_index() % 128 / 32, 0), own.lane = lane, own.before = 0;
  WorkRanges* const common = (WorkRanges*)(shared + RANGES_AT);
  if (thread_index() < 32) {
    const WorkRanges ranges(args, lane);
    if (lane == 0) *common = ranges;
  }
  while (true) {
    bar_sync(CONSUMERS, 256);
    const WorkRange range = broadcast(common->range);
    if (range.b < 0) return;
    const WorkTile tile(args, range.b, range.tile);
    own.first = range.first, own.count = shfl(min_i32(range.last, tile.kv_blocks(args)) - range.first, 0);
    own.clear_end = tile.visible_end(args, 0);
    each_query<8, 4>(args, tile, 4 * group + own.warp, lane,
        [&](const Query& query, int n) { stage_query(args, tile, query, n, shared); });
    fence_proxy_async();
    bar_sync(CONSUMERS, 256);
    own.take_rows();
    bar_sync(CONSUMERS, 256);
    Output o;
    UNROLL_FOR (int i = 0; i < HALF / 2; i++) o[i] = 0.0f;
    own.attend_range(o);
    own.before += max_i32(own.count, 0);
    store_results(Results(args, range, tile), own, o);
    bar_sync(CONSUMERS, 256);
    if (thread_index() == 0) common->advance(args);
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  const int lane = thread_index() & 31, warp = shfl(thread_index() / 32, 0);
  u64* const full = (u64*)(shared + BARRIERS_AT);
  u64* const empty = full + 5 * STAGES;
  fill_rope_levels<THREADS>(args.rope_levels, shared + ROPE_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < 8 * STAGES; i++) mbarrier_init(full + i, 4);
    fence_mbarrier_init();
  }
  pdl_wait();
  sync_threads();
  if (warp >= 8) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    Producer{args, shared + RING_AT, (TokenScales*)(shared + SCALES_AT), full, empty,
        {shared_address(shared + ROPE_LEVELS_AT)}, warp - 8, lane}
        .run();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    attend_ranges(args, shared, full, empty, warp / 4, lane);
  }
}
HOST_TESTABLE(attend, LatentArgs)
