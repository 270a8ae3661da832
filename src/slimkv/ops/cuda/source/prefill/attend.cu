// Attention of many queries per sequence on unpacked keys and values (tiles.cuh), for sm_90a.
//
// A thread block has 64 x CONSUMERS x ROW_BLOCKS query rows (queries x heads of a group) of one KV head and visits its
// tiles from last to first. One thread copies tiles into two rings in shared memory, or (FUSED) producer warpgroups
// unpack them there from their pages. Consumer warpgroups of 64 rows per row block keep scores, probabilities and
// output in registers. As in FlashAttention-3, a warpgroup issues the scores of the next tile and the output of the
// current one before the softmax of the next tile, which overlaps the products of the output.
#include "common/hopper.cuh"
#include "prefill/rows.cuh"
#if EIGHT_BIT
#include "prefill/eight_bit_loop.cuh"
#else
#include "prefill/sixteen_bit.cuh"
#endif

// Makes the queries visible to the warpgroup's wgmmas.
DEVICE void queries_are_written(int warpgroup) {
  fence_proxy_async();
  bar_sync(1 + warpgroup, 128);
}
#include "prefill/attend_rows.cuh"
#if FUSED
#include "prefill/producer.cuh"
#elif AHEAD
#include "prefill/ahead.cuh"
#endif

#if !FUSED
// One thread: copies all tiles in the order of their use.
DEVICE void copy_tiles(const PrefillArgs& args, const Work& w, const Rings& rings) {
  const i64 row = tiles_of(args, w);
#if AHEAD
  const int item = item_of(w);
  if (item >= args.lead) wait_for_tiles(args, w, item);
#endif
  auto copy = [&](int i, const u8* from, u8* ring, u64* full, u64* empty, int bytes, bool scale) {
    const int slot = i % STAGES;
    const i64 tile = row + tile_at(w, i);
    if (i >= STAGES) mbarrier_wait(empty + slot, (i / STAGES - 1) & 1);
    mbarrier_arrive_expect_tx(full + slot, bytes + (scale ? 16 : 0));
    cp_async_bulk(ring + slot * bytes, from + tile * bytes, bytes, full + slot);
    if (scale) cp_async_bulk((void*)(rings.scales + slot), args.tile_scales + tile, 16, full + slot);
  };
  for (int i = 0; i <= w.count; i++) {
    if (i < w.count) copy(i, args.keys, rings.keys, rings.keys_full, rings.keys_empty, KEYS_BYTES, !EIGHT_BIT);
    if (i > 0) copy(i - 1, args.values, rings.values, rings.values_full, rings.values_empty, VALUES_BYTES, EIGHT_BIT);
  }
#if AHEAD
  release_tiles(args, w, rings, item);
#endif
}
#endif

KERNEL(THREADS, 1) attend(GRID_CONSTANT PrefillArgs args) {
#if FUSED
  SHARED_OPERANDS(shared);
#else
  SHARED_MEMORY(memory);
  u8* shared = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
#endif
  const int lane = thread_index() & 31, part = shfl(thread_index() / 128, 0);
  u64* barriers = (u64*)(shared + BARRIERS_AT);
  const Rings rings = {shared + KEYS_AT, shared + VALUES_AT, barriers, barriers + STAGES, barriers + 2 * STAGES,
      barriers + 3 * STAGES, shared + TOTALS_AT, (const TileScale*)(shared + SCALES_AT)};
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(rings.keys_full + i, FUSED ? 4 * PRODUCERS : 1),
          mbarrier_init(rings.values_full + i, FUSED ? 4 * PRODUCERS : 1);
      mbarrier_init(rings.keys_empty + i, 4 * CONSUMERS), mbarrier_init(rings.values_empty + i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
#if FUSED || AHEAD
  const Levels levels = fill_levels(args, shared + LEVELS_AT, THREADS, lane);
#endif
  sync_threads();
  Work w;
#if FUSED
  pdl_wait();
  if (args.blocks && thread_index() == 0) args.merged[block_index()].splits = 0;
#else
  griddepcontrol_launch_dependents();  // queries are rotated while `unpack` runs, which has waited for all other grids
#endif
  if (!find_work(args, lane, w)) return griddepcontrol_wait();
#if FUSED
  if (w.splits > 1 && w.split == 0 && thread_index() == 0)
    args.merged[block_index()] = {w.s.start, w.s.queries, w.head, w.first, w.splits};
#endif
  if (part < PRODUCERS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
#if FUSED
    const int warp = shfl(thread_index() / 32, 0);
    Producer{{args, w, levels, warp, lane}, rings, shared + PACKED_AT + warp * PACKED_OF_WARP}.run();
#else
    griddepcontrol_wait();
    if (thread_index() == 0) copy_tiles(args, w, rings);
#if AHEAD
    const int warp = shfl(thread_index() / 32, 0);
    if (warp > 0) unpack_share(args, w, levels, warp - 1, lane);
#endif
#endif
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    attend_rows(args, w, rings, shared, part - PRODUCERS, lane);
  }
}
HOST_TESTABLE(attend, PrefillArgs)

#if FUSED
// Adds up the splits of a work tile: block (x, y) those that start at block x of `attend`, for rows 64 y to 64 y + 63.
// A thread has one row, because most of the time goes to fetching instructions for the first time.
KERNEL(256, 1) merge(GRID_CONSTANT PrefillArgs args) {
  SHARED_MEMORY(scratch);
  const int lane = thread_index() & 31, warp = thread_index() / 32, row_block = block_index_y();
  griddepcontrol_wait();
  const MergedSplits all = args.merged[block_index()];
  Work w;
  w.s.start = all.start, w.s.queries = all.queries, w.head = all.head, w.first = all.first;
  if (all.splits <= 1 || rows_of(args, w) <= GROUP_ROWS * row_block) return;
  float x[OWN], row_max, row_sum;
  PassState(args, block_index(), row_block).add_splits(all.splits, warp / 4, x, row_max, row_sum);
  store_lane_row(args, row_of(args, w, row_block, 16 * (warp % 4) + (lane >> 2) + 8 * (warp / 4)), x, row_max, row_sum,
      scratch + warp / 4 * QUERY_BYTES + 2048 * (warp % 4), lane);
}
HOST_TESTABLE(merge, PrefillArgs)
#endif
