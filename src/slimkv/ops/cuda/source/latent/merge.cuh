// The sum of all parts of a row, by a kernel of its own.
#pragma once
#include "latent/format.cuh"
#include "latent/schedule.cuh"

// A block: 128 dimensions of one row. Its warps take turns with the parts, then all of them are added up.
constexpr int MERGERS = 8, MERGE_THREADS = 32 * MERGERS, MERGE_DIMS = 128;

KERNEL(MERGE_THREADS, 4) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(scratch);
  Words4* const sums = (Words4*)scratch;  // [merger, lane]
  const int number = block_index() / ROWS, n = block_index() % ROWS, warp = thread_index() / 32, lane = thread_index() & 31;
  const int sequence = number / args.row_tiles, tile = number % args.row_tiles;
  // What says who did what is there before any part is: the kernel before this one has waited for it.
  const Item item(args, sequence, tile);
  const Share share = share_of(args, sequence, lane);
  const Extent extent = extent_of(args, sequence);
  const int from = share.before + tile * extent.item() + ITEM_COST, low = PARTS * (from / share.size);
  const int count = extent.steps ? PARTS * ((from + extent.steps - 1) / share.size + 1) - low : 0;
  pdl_wait();
  if (n >= item.count) return;
  const i64 first = (i64)(PARTS * number + low) * ROWS + n;
  auto part_of = [&](int i) { return first + (i64)i * ROWS; };
  // Without a reference there is nothing, or no number.
  auto factor_of = [&](float reference, float highest) { return reference == MINUS_INFINITY ? 1.0f : exp2_approx(reference - highest); };

  float highest = MINUS_INFINITY, row_sum = 0.0f;
  for (int i = lane; i < count; i += 32) highest = max_f32(highest, args.states[2 * part_of(i)]);
#pragma unroll
  for (int d = 16; d; d >>= 1) highest = max_f32(highest, shfl_xor(highest, d));
  for (int i = lane; i < count; i += 32) row_sum += args.states[2 * part_of(i) + 1] * factor_of(args.states[2 * part_of(i)], highest);
#pragma unroll
  for (int d = 16; d; d >>= 1) row_sum += shfl_xor(row_sum, d);

  const int dim = MERGE_DIMS * block_index_y() + 4 * lane;
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (dim < LD) {
#pragma unroll 4
    for (int i = warp; i < count; i += MERGERS) {
      const Words4 part = *(const Words4*)(args.parts + part_of(i) * LD + dim);
      const float by = factor_of(args.states[2 * part_of(i)], highest);
      x[0] += as_float(part.x) * by, x[1] += as_float(part.y) * by, x[2] += as_float(part.z) * by, x[3] += as_float(part.w) * by;
    }
  }
  sums[32 * warp + lane] = {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])};
  sync_threads();
  const int own = MERGE_DIMS * block_index_y() + thread_index();
  if (thread_index() >= MERGE_DIMS || own >= LD) return;
  float y = 0.0f;
#pragma unroll
  for (int m = 0; m < MERGERS; m++) y += ((const float*)sums)[MERGE_DIMS * m + thread_index()];
  y *= row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  const i64 query = item.start + (item.first + n) / args.heads, head = (item.first + n) % args.heads;
  const i64 at = query * args.out_stride + head * args.out_head_stride + own;
  if (OUT_TYPE == FLOAT32) ((float*)args.out)[at] = y;
  else ((u16*)args.out)[at] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(y) : f32_to_f16(y));
  if (args.lse && own == 0)
    args.lse[query * args.heads + head] = row_sum == 0.0f ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
}
HOST_TESTABLE(merge, LatentArgs)
