// The sum of all parts of a row, by a kernel of its own.
#pragma once
#include "latent/format.cuh"
#include "latent/schedule.cuh"

// A block: some dimensions of some rows of one item. args.mergers of its warps (a power of two) take turns with the parts of a row,
// as many as the device has room for. A row waits several times for memory and has little to read: few blocks of many rows go through
// that less often, and many warps go through a long row together.
constexpr int MERGE_DIMS = LD % 256 == 0 ? 256 : 128, MERGE_AHEAD = 4, LEAST_MERGE_WARPS = 8, MOST_MERGE_WARPS = 32;
static_assert(ROWS % LEAST_MERGE_WARPS == 0, "rows of a block belong to one item");

// Four dimensions of a lane, and the 128 further on.
struct PartialRow {
  static constexpr int WORDS = MERGE_DIMS / 128;
  Words4 words[WORDS];

  DEVICE_MEMBER void load(const float* row, int lane, int dims) {
#pragma unroll
    for (int w = 0; w < WORDS; w++)
      words[w] = 128 * w + 4 * lane < dims ? *(const Words4*)(row + 128 * w + 4 * lane) : Words4{0, 0, 0, 0};
  }
  DEVICE_MEMBER void add_to(float (&x)[4 * WORDS], float by) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      x[4 * w] += as_float(words[w].x) * by, x[4 * w + 1] += as_float(words[w].y) * by;
      x[4 * w + 2] += as_float(words[w].z) * by, x[4 * w + 3] += as_float(words[w].w) * by;
    }
  }
};

KERNEL(32 * MOST_MERGE_WARPS, 1) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(scratch);
  const int warp = thread_index() / 32, lane = thread_index() & 31, mergers = args.mergers;
  const int warps = max_i32(mergers, LEAST_MERGE_WARPS), rows = warps / mergers;
  float* const sums = (float*)scratch;  // [warp, dimension]
  float* const factors = sums + warps * MERGE_DIMS;  // [warp]: what a row's sums are multiplied by
  const int first_row = block_index() * rows, number = first_row / ROWS, turn = warp % mergers, n = first_row % ROWS + warp / mergers;
  Words2* const states = (Words2*)(factors + warps) + warp / mergers * args.blocks;  // of the row's parts: reference and sum of weights
  const int sequence = number / args.row_tiles, tile = number % args.row_tiles;
  // What says who did what is there before any part is: the kernel before this one has waited for it.
  const Item item(args, sequence, tile);
  const Share share = share_of(args, sequence, lane);
  const Extent extent = extent_of(args, sequence);
  const int from = share.before + tile * extent.item() + ITEM_COST, low = PARTS * (from / share.size);
  const int parts = extent.steps ? PARTS * ((from + extent.steps - 1) / share.size + 1) - low : 0, count = n < item.count ? parts : 0;
  const int dim = MERGE_DIMS * block_index_y(), dims = min_i32(LD - dim, MERGE_DIMS);
  pdl_wait();
  const i64 first = (i64)(PARTS * number + low) * ROWS + n;
  // Without a reference there is nothing, or no number.
  auto factor_of = [&](u32 reference, float highest) {
    return as_float(reference) == MINUS_INFINITY ? 1.0f : exp2_approx(as_float(reference) - highest);
  };

  const float* next = args.parts + (first + turn * ROWS) * LD + dim;
  int left = count - turn;
  PartialRow ahead[MERGE_AHEAD];  // on their way while references are compared
  auto load = [&](PartialRow& row) {
    row.load(next, lane, left > 0 ? dims : 0);
    next += mergers * ROWS * LD, left -= mergers;
  };
#pragma unroll
  for (int j = 0; j < MERGE_AHEAD; j++) load(ahead[j]);
  float highest = MINUS_INFINITY, row_sum = 0.0f;
#pragma unroll 4
  for (int i = lane; i < count; i += 32) {  // all warps of a row write the same
    const Words2 state = *(const Words2*)(args.states + 2 * (first + i * ROWS));
    states[i] = state, highest = max_f32(highest, as_float(state.x));
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) highest = max_f32(highest, shfl_xor(highest, d));
  sync_warp();
  for (int i = lane; i < count; i += 32) row_sum += as_float(states[i].y) * factor_of(states[i].x, highest);
#pragma unroll
  for (int d = 16; d; d >>= 1) row_sum += shfl_xor(row_sum, d);

  float x[4 * PartialRow::WORDS] = {};
  for (int i = turn; i < count; i += MERGE_AHEAD * mergers) {
#pragma unroll
    for (int j = 0; j < MERGE_AHEAD; j++) {
      if (i + j * mergers < count) ahead[j].add_to(x, factor_of(states[i + j * mergers].x, highest));
      load(ahead[j]);
    }
  }
#pragma unroll
  for (int w = 0; w < PartialRow::WORDS; w++)
    *(Words4*)(sums + MERGE_DIMS * warp + 128 * w + 4 * lane) =
        {as_bits(x[4 * w]), as_bits(x[4 * w + 1]), as_bits(x[4 * w + 2]), as_bits(x[4 * w + 3])};
  if (lane == 0) factors[warp] = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  auto query_of = [&](int row) { return (i64)(item.start + (item.first + row) / args.heads); };
  if (args.lse && n < item.count && turn == 0 && lane == 0 && dim == 0)
    args.lse[query_of(n) * args.heads + (item.first + n) % args.heads] =
        row_sum == 0.0f ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
  sync_threads();
  for (int i = thread_index(); i < rows * MERGE_DIMS; i += 32 * warps) {
    const int slot = i / MERGE_DIMS, own = i % MERGE_DIMS, row = first_row % ROWS + slot;
    if (row >= item.count || own >= dims) continue;
    float y = 0.0f;
    for (int m = slot * mergers; m < (slot + 1) * mergers; m++) y += sums[MERGE_DIMS * m + own];
    y *= factors[slot * mergers];
    const i64 head = (item.first + row) % args.heads, at = query_of(row) * args.out_stride + head * args.out_head_stride + dim + own;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at] = y;
    else ((u16*)args.out)[at] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(y) : f32_to_f16(y));
  }
}
HOST_TESTABLE(merge, LatentArgs)
