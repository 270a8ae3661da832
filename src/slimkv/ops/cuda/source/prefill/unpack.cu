// Unpacks the pages of prefilled sequences into the tiles of attend.cu (tiles.cuh): all items of a pass or, for AHEAD,
// the first ones. A thread block unpacks one tile of an item, each warp 16 of its tokens.
//
// Defines: D, STEP, EIGHT_BIT, INTEGERS, BY_ROW (work.cuh), KEYS_BYTES, VALUES_BYTES (tiles.cuh), and those of
// halves.cuh or unpack_bytes.cuh. WINDOW is 1: without a window, sliding_window is longer than any sequence.
#if EIGHT_BIT
#include "prefill/unpack_bytes.cuh"
constexpr int BLOCKS_PER_SM = 512 / STEP;  // a fifth block of 256 threads would cause spills
#else
#include "prefill/unpacker.cuh"
constexpr int BLOCKS_PER_SM = 3;
#endif

KERNEL(2 * STEP, BLOCKS_PER_SM) unpack(GRID_CONSTANT PrefillArgs args) {
  SHARED_MEMORY(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31;
#if !EIGHT_BIT
  const Levels levels = fill_levels(args, shared, 2 * STEP, lane);
  sync_threads();
#endif
  pdl_wait();
  const int item = block_index(), present = present_of(args, lane);
  if (args.unpacked && block_index_y() == 0 && item == 0)
#pragma unroll 1
    for (int i = thread_index(); i < args.ranks * args.num_kv_heads; i += 2 * STEP)
      args.unpacked[i] = args.attended[i] = 0;
  if (item >= present * args.num_kv_heads) return;
  const Work w = find_item(args, item, present, lane);
  const int tile = w.origin + args.first_tile + block_index_y();
  if (tile >= end_tile_of(w)) return;
#if EIGHT_BIT
  unpack_bytes(args, w, tile, shared, warp, lane);
#else
  unpack_groups(args, w, levels, tile, warp, warp + 1, lane);
#endif
}
HOST_TESTABLE(unpack, PrefillArgs)
