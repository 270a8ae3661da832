// Stores K and V, or latents and rope parts, of new tokens, one warp per vector: for head sizes at which 16 vectors do
// not fit the registers of a warp, for fp8, and for unquantized sides. Writes the bytes that slimkv.codec defines.
//
// Defines: BLOCK_SIZE, WARPS, MIN_BLOCKS (per SM), LONG_SLOTS, ROW_STRIDE (of token rows; 0: tiles), and for K_ and V_:
// D, CORE (the order of the rotation's core matrix), KIND, BITS, CODES, FIELDS, DTYPE, VECTORS, CELL_SHIFT,
// CELL_ZERO (see Format).
#include "vectors/encode.cuh"
#include "vectors/write.cuh"

typedef Format<false, K_D, 1, K_D / 16, K_KIND, K_BITS, K_CODES, K_FIELDS, K_DTYPE, K_VECTORS, K_CELL_SHIFT,
    K_CELL_ZERO>
    Key;
typedef Format<true, V_D, 1, V_D / 16, V_KIND, V_BITS, V_CODES, V_FIELDS, V_DTYPE, V_VECTORS, V_CELL_SHIFT, V_CELL_ZERO>
    Value;
typedef Choose<LONG_SLOTS, i64, i32>::Type SlotNumber;

template <class F, int CORE> DEVICE void store_side(const SideArgs& side, const StoreArgs& args, int head, u8* memory) {
  int lane = thread_index() & 31, warp = shfl(thread_index() >> 5, 0), step = block_count() * WARPS;
  int token = warp * block_count() + block_index();
  Encoder<F, CORE> encoder(side, memory, warp, lane, 32 * WARPS);
  pdl_wait();
  encoder.start();
  const u8* rows = side.x + head * side.head_stride;
  if constexpr (F::KIND == RAW) {
#pragma unroll 1
    for (; token < args.tokens; token += step) {
      i64 slot = ((const SlotNumber*)args.slots)[token];
      if (slot >= 0)
        store_raw<F, BLOCK_SIZE>(rows + token * side.stride, args.pages + head * args.page_head_stride,
            args.page_stride, slot, lane);
    }
  } else {
    Row<F> row, next;
    i64 slot = -1, next_slot = -1;
    auto load = [&](int at, Row<F>& to, i64& where) {
      where = at < args.tokens ? (i64)((const SlotNumber*)args.slots)[at] : -1;
      if (at < args.tokens) to.load(rows + at * side.stride, lane);
    };
    load(token, row, slot);
#pragma unroll 1
    for (; token < args.tokens; token += step) {
      load(token + step, next, next_slot);
      if (slot >= 0) {
        Encoded encoded = encoder.encode(row, lane);
        store_vector<F, BLOCK_SIZE>(encoder.codes, encoded, args.pages + head * args.page_head_stride, args.page_stride,
            slot, lane);
        sync_warp();  // the codes have been read
      }
      row = next, slot = next_slot;
    }
  }
}

// Grid: any number of blocks x 2 * heads, keys and values alternating.
KERNEL(32 * WARPS, MIN_BLOCKS) store_vectors(GRID_CONSTANT StoreArgs args) {
  SHARED_MEMORY(memory);
  if (block_index_y() & 1) store_side<Value, V_CORE>(args.value, args, block_index_y() >> 1, memory);
  else store_side<Key, K_CORE>(args.key, args, block_index_y() >> 1, memory);
}
HOST_TESTABLE(store_vectors, StoreArgs)
