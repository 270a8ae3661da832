// The sum of all parts of a row, by a kernel of its own.
#pragma once
#include "latent/format.cuh"
#include "latent/schedule.cuh"

// A block: one row of all parts. MERGERS groups of threads take turns with the parts, then the first adds up what they have.
constexpr int MERGERS = 4, MERGER = 128, MERGE_THREADS = MERGERS * MERGER, OWN_DIMS = (LD + MERGER - 1) / MERGER;

KERNEL(MERGE_THREADS, 2) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(shared);
  float* sums = (float*)shared;  // [MERGERS, LD + 1]: of values and of weights
  pdl_wait();
  const int number = block_index() / ROWS, n = block_index() % ROWS, thread = thread_index() % MERGER, group = thread_index() / MERGER;
  const int sequence = number / args.row_tiles, tile = number % args.row_tiles;
  const Item item(args, sequence, tile);
  if (n >= item.count) return;
  const Share share = share_of(args, sequence, thread_index() & 31);
  const Extent extent = extent_of(args, sequence);
  const int from = share.before + tile * extent.item() + ITEM_COST;
  const int low = from / share.size, high = extent.steps ? (from + extent.steps - 1) / share.size + 1 : low;  // blocks
  float highest = MINUS_INFINITY, row_sum = 0.0f, x[OWN_DIMS];
#pragma unroll
  for (int i = 0; i < OWN_DIMS; i++) x[i] = 0.0f;
  auto part_of = [&](int block) { return (i64)(number + block) * ROWS + n; };
  for (int block = low; block < high; block++) highest = max_f32(highest, args.states[2 * part_of(block)]);
#pragma unroll 4
  for (int block = low + group; block < high; block += MERGERS) {
    const i64 part = part_of(block);
    const float reference = args.states[2 * part], sum = args.states[2 * part + 1];
    const float by = reference == MINUS_INFINITY ? 1.0f : exp2_approx(reference - highest);  // then there is nothing, or no number
    row_sum += sum * by;
#pragma unroll
    for (int i = 0; i < OWN_DIMS; i++)
      if (thread + MERGER * i < LD) x[i] += args.parts[part * LD + thread + MERGER * i] * by;
  }
#pragma unroll
  for (int i = 0; i < OWN_DIMS; i++)
    if (thread + MERGER * i < LD) sums[group * (LD + 1) + thread + MERGER * i] = x[i];
  if (thread == 0) sums[group * (LD + 1) + LD] = row_sum;
  sync_threads();
  if (group) return;
  auto total = [&](int d) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < MERGERS; m++) sum += sums[m * (LD + 1) + d];
    return sum;
  };
  row_sum = total(LD);
  const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  const i64 query = item.start + (item.first + n) / args.heads, head = (item.first + n) % args.heads;
  const i64 at = query * args.out_stride + head * args.out_head_stride;
#pragma unroll
  for (int i = 0; i < OWN_DIMS; i++) {
    const int d = thread + MERGER * i;
    if (d >= LD) continue;
    const float y = total(d) * inverse;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at + d] = y;
    else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(y) : f32_to_f16(y));
  }
  if (args.lse && thread == 0)
    args.lse[query * args.heads + head] = row_sum == 0.0f ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
}
HOST_TESTABLE(merge, LatentArgs)
