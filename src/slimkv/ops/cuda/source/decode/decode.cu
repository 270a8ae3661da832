// Attention of up to 16 query rows per KV head on packed pages: `attend` reads pages and writes outputs or partial
// results, `merge` merges the latter. The warps of a thread block take the KV blocks (steps) of its ranges
// (schedule.cuh) in turn. Each warp has its own ring in shared memory, prefetched with asynchronous copies, and its own
// online softmax.
//
// Up to 4 columns (query rows; a narrow group), integer tensor cores give exact sums of unconverted centroids. A query,
// rotated and scaled to 15 bits, is two signed bytes; a probability times its value's scale, 16 bits relative to the
// largest of the step, is two unsigned bytes; centroids are bytes. The bytes of a value word alternate between
// dimensions g and g + 8 and are regrouped. Formats without byte centroids use pairs of fp16 numbers in the same way.
//
// With more columns (wide groups of 8), integer products become expensive, and work per score outweighs work per
// centroid. So everything is in fp16, and the output stays in the accumulators.
#define VERIFY 0
#define WARPGROUPS 0
#include "decode/decode_combine.cuh"
#include "decode/decode_scores.cuh"
#include "decode/decode_values.cuh"
#include "decode/loader.cuh"
#include "decode/merge.cuh"

constexpr int QUERIES_OF_WARP = (COLUMNS + WARPS - 1) / WARPS;
typedef float WarpQueries[QUERIES_OF_WARP][QN];

// A warp's ring of prefetched steps.
struct WarpRing {
  Loader loader;
  int warp, filled;  // steps copied so far; slot = number % STAGES, if there are several

  DEVICE_MEMBER void init(u8* shared, int warp_, int lane) {
    warp = warp_, filled = 0;
    loader.init(shared, warp, lane);
  }
  DEVICE_MEMBER u8* slot(int number) const { return loader.ring + number % STAGES * SLOT; }
  DEVICE_MEMBER void look_up(const DecodeRange& range, int step) {
    if (range.to > range.from) loader.look_up(min_i32(step, range.to - 1));  // a work tile may have no keys
  }
  // Starts copying the first steps of a range.
  DEVICE_MEMBER void begin(const DecodeArgs& args, const DecodeRange& range) {
    loader.open(args, range);
    const int step = range.first_step(warp);
    look_up(range, step);
    if constexpr (STAGES == 1) {
      loader.copy<true, false>(step, 0, step < range.to);
      loader.copy<false, true>(step, 0, step < range.to);
      look_up(range, step + WARPS);
    }
    UNROLL_FOR (int i = 0; i < STAGES - 1; i++) copy(range, step + i * WARPS);
  }
  // Starts copying a step to the next slot of a ring with several slots.
  DEVICE_MEMBER void copy(const DecodeRange& range, int step) {
    loader.copy(step, filled % STAGES, step < range.to);
    filled++;
    look_up(range, step + WARPS);
  }
};

// One step: scores, probabilities, and their products with values.
DEVICE void attend_step(const DecodeArgs& args, const DecodeRange& range, int step, int taken, const u8* shared,
    WarpRing& ring, QueryOperands& queries, const ColumnState& columns, const LevelTables& tables, int lane,
    Accumulator& acc) {
  Loader& loader = ring.loader;
  loader.wait(taken % STAGES, true);
  if (STAGES > 1) ring.copy(range, step + (STAGES - 1) * WARPS);
  const int next_step = step + WARPS, g = lane >> 2;  // next_step is used only with one slot
  u8* slot = ring.slot(taken);
  const int token0 = range.s.begin + step * STEP;
  const bool clear = token0 + STEP <= columns.clear_end && token0 >= columns.clear_begin;
  StepScores s;
  Probabilities probabilities;
  multiply_keys(slot, shared, queries, tables, lane, s);
  scale_scores(args, slot, columns, g, s);
  if (STAGES == 1) loader.wait_for_values();
  apply_mask(slot, shared, token0, clear, lane, s, acc.largest_fields);
  if constexpr (STAGES == 1) {
    sync_warp();
    loader.copy<true, false>(next_step, 0, next_step < range.to);
  }
  weigh_step(slot, columns, g, s, acc, probabilities);
  add_values(slot, probabilities, tables, lane, acc);
  sync_warp();  // before this slot is filled again
  if constexpr (STAGES == 1) {
    loader.copy<false, true>(next_step, 0, next_step < range.to);
    ring.look_up(range, next_step + WARPS);
  }
}

KERNEL(32 * WARPS, BLOCKS_PER_SM) attend(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, t = lane & 3;
  pdl_wait();
  WorkPartition partition;
  int left = 0;  // positions of this block
  DecodeRange range(args,
      args.blocks ? first_range(args, block_index(), args.blocks, lane, partition, left) : whole_tile(args));
  if (args.blocks ? left <= 0 : range.s.tiles == 0) return;
  const LevelTables tables = load_tables(args, shared, lane);

  // The queries are loaded while the first pages are copied.
  WarpRing ring;
  ring.init(shared, warp, lane);
  WarpQueries query;
  bool same_queries = false;  // a further split of the same work tile
  auto begin_loading = [&](const DecodeRange& p) {
    UNROLL_FOR (int i = 0; i < QUERIES_OF_WARP; i++)
      if (!same_queries && warp + i * WARPS < COLUMNS) load_query(args, p, warp + i * WARPS, query[i], lane);
    ring.begin(args, p);
  };
  begin_loading(range);

  while (true) {
    UNROLL_FOR (int i = 0; i < QUERIES_OF_WARP; i++)
      if (!same_queries && warp + i * WARPS < COLUMNS)
        prepare_query(args, range, warp + i * WARPS, query[i], shared, shared + QUERY_AT,
            (float*)(OWN_SCRATCH ? shared + SCRATCH_AT + 4 * KD * warp : ring.slot(ring.filled)), lane);
    if (BULK) fence_proxy_async();  // queries were rotated in the rings, which bulk copies fill next
    sync_threads();
    QueryOperands queries;
    queries.load(shared + QUERY_AT, lane);
    ColumnState columns;
    columns.load(args, range, shared, t);
    Accumulator acc;
    acc.clear();

    int taken = ring.filled - (STAGES - 1);
    for (int step = range.first_step(warp); step < range.to; step += WARPS, taken++)
      attend_step(args, range, step, taken, shared, ring, queries, columns, tables, lane, acc);
    ring.loader.wait_for_all();

    // The next range is loaded while this one is finished; slot 0 is kept free for this one's results.
    DecodeRange next = range;
    ring.filled = 1;
    same_queries = next.next_split(args);
    left -=
        (same_queries ? 1 : range.last - range.first) + (SPLITS ? 0 : TILE_COST);  // and the cost of the next work tile
    if (left > 0) {
      if (!same_queries) next = DecodeRange(args, next_range(args, range, left));
      if (STAGES > 1) begin_loading(next);
    }
    combine_warps(args, range, columns, acc, shared, ring.loader.ring, warp, lane);
    if (left <= 0) return;
    if (STAGES == 1) {
      if (BULK) fence_proxy_async(), sync_warp();  // pages will overwrite results
      begin_loading(next);
    }
    range = next;
  }
}
HOST_TESTABLE(attend, DecodeArgs)
