// The sum of all parts of a row, by a kernel of its own.
#pragma once
#include "latent/format.cuh"
#include "latent/schedule.cuh"

// A block: some dimensions of some rows of one item. args.mergers of its warps (a power of two) take turns with the parts of a row.
// A row waits several times for memory and has little to read: few blocks of many rows go through that less often.
constexpr int MERGE_WARPS = 8, MERGE_THREADS = 32 * MERGE_WARPS, MERGE_DIMS = LD % 256 == 0 ? 256 : 128, MERGE_AHEAD = 3;
static_assert(ROWS % MERGE_WARPS == 0, "rows of a block belong to one item");

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

KERNEL(MERGE_THREADS, 4) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(scratch);
  float* const sums = (float*)scratch;  // [warp, dimension]
  float* const factors = sums + MERGE_WARPS * MERGE_DIMS;  // [warp]: what a row's sums are multiplied by
  const int warp = thread_index() / 32, lane = thread_index() & 31, mergers = args.mergers, rows = MERGE_WARPS / mergers;
  const int first_row = block_index() * rows, number = first_row / ROWS, turn = warp % mergers, n = first_row % ROWS + warp / mergers;
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
  auto part_of = [&](int i) { return first + (i64)i * ROWS; };
  // Without a reference there is nothing, or no number.
  auto factor_of = [&](float reference, float highest) { return reference == MINUS_INFINITY ? 1.0f : exp2_approx(reference - highest); };

  const float* next = args.parts + part_of(turn) * LD + dim;
  int left = count - turn;
  PartialRow ahead[MERGE_AHEAD];  // on their way while references are compared
  auto load = [&](PartialRow& row) {
    row.load(next, lane, left > 0 ? dims : 0);
    next += mergers * ROWS * LD, left -= mergers;
  };
#pragma unroll
  for (int j = 0; j < MERGE_AHEAD; j++) load(ahead[j]);
  float highest = MINUS_INFINITY, row_sum = 0.0f;
  for (int i = lane; i < count; i += 32) highest = max_f32(highest, args.states[2 * part_of(i)]);
#pragma unroll
  for (int d = 16; d; d >>= 1) highest = max_f32(highest, shfl_xor(highest, d));
  for (int i = lane; i < count; i += 32) row_sum += args.states[2 * part_of(i) + 1] * factor_of(args.states[2 * part_of(i)], highest);
#pragma unroll
  for (int d = 16; d; d >>= 1) row_sum += shfl_xor(row_sum, d);

  float x[4 * PartialRow::WORDS] = {};
  for (int i = turn; i < count; i += MERGE_AHEAD * mergers) {
    float by[MERGE_AHEAD];
#pragma unroll
    for (int j = 0; j < MERGE_AHEAD; j++) by[j] = i + j * mergers < count ? factor_of(args.states[2 * part_of(i + j * mergers)], highest) : 0.0f;
#pragma unroll
    for (int j = 0; j < MERGE_AHEAD; j++) {
      ahead[j].add_to(x, by[j]);
      load(ahead[j]);
    }
  }
#pragma unroll
  for (int w = 0; w < PartialRow::WORDS; w++)
    *(Words4*)(sums + MERGE_DIMS * warp + 128 * w + 4 * lane) =
        {as_bits(x[4 * w]), as_bits(x[4 * w + 1]), as_bits(x[4 * w + 2]), as_bits(x[4 * w + 3])};
  if (lane == 0) factors[warp] = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  auto output_of = [&](int row) { return (item.first + row) / args.heads; };
  if (args.lse && n < item.count && turn == 0 && lane == 0 && dim == 0)
    args.lse[(i64)(item.start + output_of(n)) * args.heads + (item.first + n) % args.heads] =
        row_sum == 0.0f ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
  sync_threads();
  for (int i = thread_index(); i < rows * MERGE_DIMS; i += MERGE_THREADS) {
    const int slot = i / MERGE_DIMS, own = i % MERGE_DIMS, row = first_row % ROWS + slot;
    if (row >= item.count || own >= dims) continue;
    float y = 0.0f;
    for (int m = slot * mergers; m < (slot + 1) * mergers; m++) y += sums[MERGE_DIMS * m + own];
    y *= factors[slot * mergers];
    const i64 head = (item.first + row) % args.heads;
    const i64 at = (i64)(item.start + output_of(row)) * args.out_stride + head * args.out_head_stride + dim + own;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at] = y;
    else ((u16*)args.out)[at] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(y) : f32_to_f16(y));
  }
}
HOST_TESTABLE(merge, LatentArgs)
