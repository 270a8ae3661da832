// K and V of new tokens to their slots, byte for byte as slimkv.codec has it: all that is summed are integers, everything else
// single IEEE operations. Compiled for one layout and one pair of input types.
//
// Given: PAGE, WARPS, TILES_PER_BLOCK (1 or WARPS), BLOCKS (a multiprocessor should hold), LONG_SLOTS, SHAPED
// (query-aware rounding of keys), and of K_ and V_: D, GROUPS, PER, KIND, BITS, POLICY,
// ROTATED, CODES, FIELDS, DTYPE, VECTORS, CELL_SHIFT, CELL_ZERO (see Format).
#include "store_direct.cuh"
#include "store_lloyd.cuh"
#include "store_shaped.cuh"

typedef Format<false, K_D, K_GROUPS, K_PER, K_KIND, K_BITS, K_POLICY, K_ROTATED, K_CODES, K_FIELDS, K_DTYPE, K_VECTORS, K_CELL_SHIFT, K_CELL_ZERO> Key;
typedef Format<true, V_D, V_GROUPS, V_PER, V_KIND, V_BITS, V_POLICY, V_ROTATED, V_CODES, V_FIELDS, V_DTYPE, V_VECTORS, V_CELL_SHIFT, V_CELL_ZERO> Value;
typedef Choose<LONG_SLOTS, i64, i32>::Type SlotNumber;

template <class F> DEVICE void store_side(const SideArgs& side, const StoreArgs& args, int head, u8* memory) {
  int warp = thread_index() >> 5;
  // Either every warp has a tile of its own, or all share one.
  int tile = TILES_PER_BLOCK == 1 ? block_index() : block_index() * WARPS + warp;
  if constexpr (F::KIND == STORE_LLOYD) {
    store_lloyd<F, PAGE, SlotNumber>(side, args, head, 16 * tile, TILES_PER_BLOCK == 1 ? warp : 0, memory, 32 * WARPS);
  } else if (TILES_PER_BLOCK > 1 || warp == 0) {
    store_direct<F, PAGE, SlotNumber>(side, args, head, 16 * tile);
  }
}

// Grid: tiles (or WARPS tiles) by twice the heads, keys and values in turn.
KERNEL(32 * WARPS, BLOCKS) store(GRID_CONSTANT StoreArgs args) {
  SHARED_MEMORY(memory);
  int head = block_index_y() >> 1;
  if (block_index_y() & 1) store_side<Value>(args.value, args, head, memory);
  else if constexpr (SHAPED) {  // twice the tokens for each warp
    store_shaped<Key, PAGE, SlotNumber>(args.key, args, head, 32 * (block_index() * WARPS + (thread_index() >> 5)), memory, 32 * WARPS);
  } else store_side<Key>(args.key, args, head, memory);
}
LAUNCHABLE(store, StoreArgs)
