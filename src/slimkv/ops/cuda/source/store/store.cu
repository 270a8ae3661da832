// Stores K and V of new tokens as Lloyd-Max codes, with the bytes that slimkv.codec defines: all sums are integer sums,
// everything else is single IEEE operations. Compiled for one layout and one pair of input dtypes.
//
// Defines: BLOCK_SIZE, WARPS, TILES_PER_BLOCK (1 or WARPS), MIN_BLOCKS (per SM), LONG_SLOTS, QUERY_AWARE (query-aware
// rounding of keys: 1 with one matrix per head, 2 with several), SHARED_WEIGHTS (copy the matrix to shared memory),
// CELL_RECORDS (copy the cells' records too), and for K_ and V_: D, GROUPS, PER, KIND, BITS, CODES, FIELDS, DTYPE,
// VECTORS, CELL_SHIFT, CELL_ZERO (see Format).
#include "store/lloyd.cuh"
#include "store/query_aware.cuh"

typedef Format<false, K_D, K_GROUPS, K_PER, K_KIND, K_BITS, K_CODES, K_FIELDS, K_DTYPE, K_VECTORS, K_CELL_SHIFT,
    K_CELL_ZERO>
    Key;
typedef Format<true, V_D, V_GROUPS, V_PER, V_KIND, V_BITS, V_CODES, V_FIELDS, V_DTYPE, V_VECTORS, V_CELL_SHIFT,
    V_CELL_ZERO>
    Value;
typedef Choose<LONG_SLOTS, i64, i32>::Type SlotNumber;

template <class F> DEVICE void store_side(const SideArgs& side, const StoreArgs& args, int head, u8* memory) {
  int warp = shfl(thread_index() >> 5, 0);  // broadcast, so that the compiler knows that it is warp-uniform
  constexpr bool TOGETHER = TILES_PER_BLOCK == 1;
  int tile = TOGETHER ? block_index() : warp * block_count() + block_index(), step = block_count() * WARPS;
  if constexpr (TOGETHER)
    store_lloyd_together<F, BLOCK_SIZE, SlotNumber>(side, args, head, 16 * tile, memory, 32 * WARPS);
  else store_lloyd_tiles<F, BLOCK_SIZE, SlotNumber>(side, args, head, tile, step, memory, 32 * WARPS);
}

// Stores keys and values of 32 tokens per pair of warps (see query_aware.cuh).
template <class K, class V> DEVICE void store_both(const StoreArgs& args, int head, int matrix, u8* memory) {
  constexpr int HALF = WARPS / 2;
  u8* value_memory =
      memory + ScaledLevels<K>::TABLE_BYTES + Weights<K>::SHARED_BYTES + HALF * QueryAwareMemory<K>::BYTES;
  auto fetch_tables = [&] {
    fill_query_aware_tables<K>(args.key, args, head, matrix, memory, 32 * WARPS);
    LloydTables<V>(value_memory).fill(value_memory, args.value, thread_index(), 32 * WARPS);
    prefetch_rotation<K>(args.key, thread_index(), 32 * WARPS);
  };
  if constexpr (WARPS == 2) fetch_tables();  // few tokens: overlaps the end of the previous kernel
  pdl_wait();
  int warp = shfl(thread_index() >> 5, 0);  // uniform, as above
  int pair = warp % HALF, first = 32 * (block_index() * HALF + pair);
  u32 rows[K::CHUNKS][2][K::RAW];
  load_rows<K>(args.key, head, first + 16 * (warp / HALF), args.tokens, thread_index() & 31, rows);
  if constexpr (WARPS > 2) fetch_tables();  // needed only after the rotation
  auto values = [&] {
    if (matrix > 0) return;
#pragma unroll 1
    for (int at = first; at < first + 32 && at < args.tokens; at += 16) {
      u32 raw[V::CHUNKS][2][V::RAW];
      load_rows<V>(args.value, head, at, args.tokens, thread_index() & 31, raw);
      store_lloyd_rows<V, BLOCK_SIZE, SlotNumber>(raw, args.value, args, head, at, 0, Slots(), value_memory,
          thread_index() & 31);
    }
  };
  store_query_aware<K, BLOCK_SIZE, SlotNumber>(args.key, args, head, matrix, first, rows, memory, pair, warp / HALF,
      values);
}

// Grid: tiles (or any number of blocks, for many tiles) x 2 * heads, keys and values alternating. With query-aware
// rounding: groups of WARPS tiles x heads and, if few tokens use different matrices (spread), x matrices.
KERNEL(32 * WARPS, MIN_BLOCKS) store(GRID_CONSTANT StoreArgs args) {
  SHARED_MEMORY(memory);
  if constexpr (QUERY_AWARE) {
    int matrix = QUERY_AWARE > 1 && args.spread ? block_index_y() / args.heads : 0;
    store_both<Key, Value>(args, block_index_y() - matrix * args.heads, matrix, memory);
  } else if (block_index_y() & 1) store_side<Value>(args.value, args, block_index_y() >> 1, memory);
  else store_side<Key>(args.key, args, block_index_y() >> 1, memory);
}
HOST_TESTABLE(store, StoreArgs)
