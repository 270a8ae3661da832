// Attention of many queries per sequence on unpacked keys and values (tiles.cuh), from sm_80 on: attend.cu with
// mma.sync, where all threads copy. A thread block has 64 x CONSUMERS x ROW_BLOCKS rows, a warp 16 of every 64.
// Defines in addition to work.cuh: BLOCKS_PER_SM (limits registers).
#if EIGHT_BIT
#include "prefill/warp_bytes.cuh"
#else
#include "prefill/warp_products.cuh"
#endif
#include "prefill/attend_rows.cuh"

KERNEL(THREADS, BLOCKS_PER_SM) attend(GRID_CONSTANT PrefillArgs args) {
  SHARED_OPERANDS(shared);
  const int lane = thread_index() & 31, warpgroup = shfl(thread_index() / 128, 0);
  const Rings rings = {shared + KEYS_AT, shared + VALUES_AT, 0, 0, 0, 0, 0, (const TileScale*)(shared + SCALES_AT)};
  pdl_wait();
  Work w;
  if (find_work(args, lane, w)) attend_rows(args, w, rings, shared, warpgroup, lane);
}
HOST_TESTABLE(attend, PrefillArgs)
