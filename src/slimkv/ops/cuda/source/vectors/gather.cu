// Gathers tokens from pages into dense vectors, one warp per vector: latents, and K and V of the same sizes. The
// inverse rotation sums centroids exactly, so a value is rounded only by its scale and then to the output dtype.
//
// Defines: BLOCK_SIZE, WARPS, MIN_BLOCKS (per SM), LONG_SLOTS, and for K_ and V_: D, CORE (the rotation doubles a
// matrix of this size), UNROTATE, KIND, BITS, CODES, FIELDS, RAW_DTYPE (of raw sides), DTYPE and VECTORS (of the
// output).
#include "vectors/decode.cuh"

struct GatherArgs {
  GatherSide key, value;
  const u8* pages;
  i64 page_stride, page_head_stride;
  const void* slots;
  i32 tokens;
};

typedef Format<false, K_D, 1, K_D / 16, K_KIND, K_BITS, K_CODES, K_FIELDS, K_DTYPE, K_VECTORS, 0, 8> Key;
typedef Format<true, V_D, 1, V_D / 16, V_KIND, V_BITS, V_CODES, V_FIELDS, V_DTYPE, V_VECTORS, 0, 8> Value;
typedef Choose<LONG_SLOTS, i64, i32>::Type SlotNumber;

template <class F, class D> DEVICE void gather_side(const GatherSide& side, const GatherArgs& args, int head,
    u8* memory) {
  int lane = thread_index() & 31, warp = shfl(thread_index() >> 5, 0), step = block_count() * WARPS;
  int token = warp * block_count() + block_index();
  D decoder(side, memory, warp, lane, 32 * WARPS);
  pdl_wait();
  const u8* pages = args.pages + head * args.page_head_stride;
  u8* rows = side.x + head * side.head_stride;
  auto slot_of = [&](int at) { return at < args.tokens ? (i64)((const SlotNumber*)args.slots)[at] : -1; };
  i64 slot = slot_of(token), next_slot = slot_of(token + step);
  Units<F> units, next;
  if (slot >= 0) units.template load<BLOCK_SIZE>(pages, args.page_stride, slot, lane);
#pragma unroll 1
  for (; token < args.tokens; token += step) {
    const i64 after = slot_of(token + 2 * step);
    if (next_slot >= 0) next.template load<BLOCK_SIZE>(pages, args.page_stride, next_slot, lane);
    u8* row = rows + token * side.stride;
    if (slot >= 0) decoder.decode(units, row, lane);
    else decoder.clear(row, lane);
    units = next, slot = next_slot, next_slot = after;
  }
}

// Grid: any number of blocks by twice the heads, keys and values in turn.
KERNEL(32 * WARPS, MIN_BLOCKS) gather_vectors(GRID_CONSTANT GatherArgs args) {
  SHARED_MEMORY(memory);
  if (block_index_y() & 1)
    gather_side<Value, Decoder<Value, V_CORE, V_UNROTATE, V_RAW_DTYPE>>(args.value, args, block_index_y() >> 1, memory);
  else gather_side<Key, Decoder<Key, K_CORE, K_UNROTATE, K_RAW_DTYPE>>(args.key, args, block_index_y() >> 1, memory);
}
HOST_TESTABLE(gather_vectors, GatherArgs)
