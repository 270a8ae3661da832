// What kernels with products of single warps share: tiles come to shared memory by copies of all threads.
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

static_assert(KEYS_BYTES == VALUES_BYTES, "tiles are copied alike");

// A warp's queries are its own.
DEVICE void queries_are_written(int) { sync_warp(); }

// Where the workspace would have tile 0 of the block's sequence and head.
DEVICE i64 tiles_of(const PrefillArgs& args, const Work& w) {
  return ((i64)w.s.rank * args.num_kv_heads + w.head) * args.tiles - w.origin - args.first_tile;
}

// A thread's part of a tile.
DEVICE void copy_tile(u8* to, const u8* from) {
  UNROLL_FOR (int i = 0; i < KEYS_BYTES; i += 16 * THREADS)
    if (KEYS_BYTES % (16 * THREADS) == 0 || i + 16 * thread_index() < KEYS_BYTES)
      cp_async_16(to + i + 16 * thread_index(), from + i + 16 * thread_index());
}
