// Attention of many query rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope parts,
// values from the same latents.
//
// A thread block has up to 64 rows of a sequence and some of its tokens, in KV blocks of 64. One warpgroup unpacks a KV
// block into shared memory as levels, which halves hold exactly, once for scores (tokens x dimensions) and for values,
// which `wgmma` reads transposed; scores and probabilities are multiplied by the tokens' scales. Two warpgroups
// multiply: each has half the dimensions of the output, and they take turns with the scores of KV blocks. Probabilities
// go to the other one through shared memory.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int THREADS = 384, TILE_COST = 4;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/wide_consumer.cuh"

// With fewer registers for those that multiply, the compiler makes every product wait for the one before it.
constexpr int PRODUCER_REGISTERS = 104, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
static_assert(ROWS == 64 && KV_BLOCK == 64, "operands");
static_assert(L_LEVELS == 0 && (HALF == 64 || HALF == 128 || HALF == 256), "latents that are not looked up");
static_assert(RING_AT - QUERIES_AT == STAGE && PROBABILITIES_AT - RING_AT == STAGES * STAGE &&
        BARRIERS_AT - SCALES_AT == STAGES * sizeof(TokenScales) && sizeof(WorkRanges) <= ROPE_LEVELS_AT - RANGES_AT,
    "regions of shared memory");

// Row n of a work tile, by one warp: 64 dimensions side by side at `to`, those of the rope part behind the latent's.
// Rows beyond the last are zeros and see nothing.
DEVICE void stage_query(const LatentArgs& args, const WorkTile& tile, const Query& query, int n, u8* to, Row* rows) {
  const u32 sign = args.scale < 0.0f ? 0x8000u : 0u;  // so that units are positive
  const float latent = query.latent_unit() * (LEVEL_UNIT / L_UNIT), ratio = query.rope_unit() / latent;
  auto place = [&](int at) { return at / 64 * ROWS * 128 + n * 128 + ((at % 64 / 8 ^ (n & 7)) << 4) + at % 8 * 2; };
  query.latent_operand([&](int at, u32 bits) { *(u16*)(to + place(at)) = (u16)(bits ^ sign); },
      [&](int at, u32 bits) { *(u32*)(to + place(at)) = bits ^ sign * 0x10001u; });
  query.rope_operand([&](int at, u32 bits) { *(u16*)(to + place(LD + at)) = (u16)(bits ^ sign); }, ratio);
  if (query.lane == 0) {
    const int visible_end = query.real ? tile.visible_end(args, n) : 0;
    rows[n] = {latent * as_float(as_bits(args.scale) & 0x7FFFFFFF), ratio, visible_end, 0};
  }
}

// ---- partial results ------------------------------------------------------------------------------------------------

// 16 rows of the output, from row `first` on, to memory as they are in registers.
DEVICE void store_output_directly(float* to, const Output& o, int first, int count, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int n = first + (lane >> 2) + 8 * r;
    if (n >= count) continue;
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        to[(i64)n * LD + place_of(8 * j + 2 * (lane & 3) + i)] = o[4 * j + 2 * r + i] * LEVEL_UNIT;
  }
}

// The same through shared memory, in whole cache lines.
constexpr int PASS = 32, PITCH = 4 * PASS + 32;  // dimensions at a time, and bytes of a row, for different banks
constexpr int SCRATCH = CHUNKS / 2 * CHUNK / 4;  // of a warp: its share of the own dimensions of a stage
constexpr bool STAGED_OUTPUT = 2 * 16 * PITCH <= SCRATCH;
DEVICE void store_output_staged(float* to, const Output& o, int first, int count, u8* scratch, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int pass = 0; pass < HALF / PASS; pass++) {
    u8* const rows = scratch + pass % 2 * 16 * PITCH;
#pragma unroll
    for (int j = 0; j < PASS / 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = PASS / 2 * pass + 4 * j + 2 * r;
        float* const row = (float*)(rows + (g + 8 * r) * PITCH);
        const float low = o[at] * LEVEL_UNIT, high = o[at + 1] * LEVEL_UNIT;
        if (IN_BYTES) *(Words2*)(row + 8 * j + 2 * t) = {as_bits(low), as_bits(high)};
        else row[place_of(8 * j + 2 * t)] = low, row[place_of(8 * j + 2 * t + 1)] = high;
      }
    sync_warp();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int n = 4 * k + lane / 8;
      const Words4 own = *(const Words4*)(rows + n * PITCH + lane % 8 * 16);
      if (first + n < count) *(Words4*)(to + (i64)(first + n) * LD + PASS * pass + lane % 8 * 4) = own;
    }
  }
}

// What this thread block has of a work tile. The first warpgroup adds up both sums of probabilities.
DEVICE void store_partial(const LatentArgs& args, const WorkRange& range, const WorkTile& tile, Consumer& own,
    const Output& o) {
  const int thread = thread_index() % 128, t = own.lane & 3;
#pragma unroll
  for (int r = 0; r < 2; r++)
    own.row_sum[r] += shfl_xor(own.row_sum[r], 1), own.row_sum[r] += shfl_xor(own.row_sum[r], 2);
  bar_sync(CONSUMERS, 256);
  float* sums = (float*)(own.shared + PROBABILITIES_AT) + 2 * thread;
  if (own.group) sums[0] = own.row_sum[0], sums[1] = own.row_sum[1];
  bar_sync(CONSUMERS, 256);
  const i64 part = (i64)part_of(range) * ROWS;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int n = own.row_of(r);
    if (own.group == 0 && t == 0 && n < tile.count)
      args.states[2 * (part + n)] = own.row_max[r], args.states[2 * (part + n) + 1] = own.row_sum[r] + sums[r];
  }
  float* const to = args.parts + part * LD + own.group * HALF;
  if (STAGED_OUTPUT && own.count > 0) {
    const u32 at = (own.before - 1) % STAGES * STAGE + own.group * (CHUNKS / 2) * CHUNK + own.warp * SCRATCH;
    store_output_staged(to, o, 16 * own.warp, tile.count, own.shared + RING_AT + at, own.lane);
  } else {
    store_output_directly(to, o, 16 * own.warp, tile.count, own.lane);
  }
  sync_warp();
  if (own.lane == 0 && own.count > 0) mbarrier_arrive(own.empty + 2 * ((own.before - 1) % STAGES) + own.group);
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
    each_query<8, 4>(args, tile, 4 * group + own.warp, lane, [&](const Query& query, int n) {
      stage_query(args, tile, query, n, shared + QUERIES_AT, (Row*)(shared + PROBABILITIES_AT));
    });
    fence_proxy_async();
    bar_sync(CONSUMERS, 256);
    own.take_rows();
    bar_sync(CONSUMERS, 256);
    Output o;
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) o[i] = 0.0f;
    own.attend_range(o);
    own.before += max_i32(own.count, 0);
    store_partial(args, range, tile, own, o);
    bar_sync(CONSUMERS, 256);
    if (thread_index() == 0) common->advance(args);
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  const int lane = thread_index() & 31, warp = shfl(thread_index() / 32, 0);
  u64* const full = (u64*)(shared + BARRIERS_AT);  // [stage, quarter of the dimensions]
  u64* const empty = full + 4 * STAGES;  // [stage, half of the dimensions]
  fill_rope_levels<THREADS>(args.rope_levels, shared + ROPE_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < 6 * STAGES; i++) mbarrier_init(full + i, 4);
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
