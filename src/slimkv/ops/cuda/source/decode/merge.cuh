// Puts the parts of a (query, head) together and writes its output, unless a single block has done that. `merge_split` warps share the parts of one, so that few rows with many parts do not wait for one load after the other. Blocks are
// small: they fit beside those of `attend` and have looked everything up when the last of these is done.
#pragma once
#include "decode/output.cuh"

constexpr int MERGE_WARPS = 2, PARTS_AT_ONCE = 4;

KERNEL(32 * MERGE_WARPS, 1) merge(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, split = args.merge_split;
  const int places = args.merge_places, head = block_index_y() * (MERGE_WARPS / split) + warp / split;
  const int query_heads = args.num_kv_heads * args.group_size;
  // No block may end before `attend` does.
  if (!places && block_index() >= ldg_i32(args.cu_seqlens_q + args.num_seqs)) return griddepcontrol_wait();
  const int b = places ? block_index() / places : sequence_of(args, block_index());
  const Sequence s = sequence_at(args, b);
  const int query = places ? block_index() % places : block_index() - s.start, row = s.start + query;
  if (s.chunks == 0 || query >= s.queries) return griddepcontrol_wait();  // another kernel's
  const WorkOffset offset = offset_of(args, b, args.blocks, lane);
  const WorkPartition partition = offset.partition;
  const int per_chunk = COLUMNS / args.group_size, chunk = query / per_chunk;
  const int column = (query % per_chunk) * args.group_size + head % args.group_size;
  const int within = chunk * args.num_kv_heads + head / args.group_size, item = offset.items + within;
  const int first = offset.positions + within * partition.positions(s.steps) + partition.lead(), first_block = first / partition.share;
  const int last_block = s.steps && head < query_heads ? (first + s.steps - 1) / partition.share : first_block - 1;
  griddepcontrol_wait();
  if (WHOLE_ITEMS && split == 1 && first_block == last_block) return;

  MergedState merged;
  merged.clear();
  for (int block = first_block + warp % split; block <= last_block; block += PARTS_AT_ONCE * split) {
    float m[PARTS_AT_ONCE], l[PARTS_AT_ONCE], v[PARTS_AT_ONCE][VN];
#pragma unroll
    for (int j = 0; j < PARTS_AT_ONCE; j++) {
      const bool real = block + j * split <= last_block;
      const i64 part = (i64)(item + (real ? block + j * split : block)) * COLUMNS + column;
      m[j] = real ? args.part_states[2 * part] : MINUS_INFINITY;
      l[j] = real ? args.part_states[2 * part + 1] : 0.0f;
#pragma unroll
      for (int i = 0; i < VN; i++) v[j][i] = real && lane + 32 * i < VD ? args.parts[part * VD + lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < PARTS_AT_ONCE; j++) merged.add(m[j], l[j], v[j]);
  }
  float* mine = (float*)shared + warp * (VD + 2);
  if (split > 1) {
    if (lane == 0) mine[VD] = merged.highest, mine[VD + 1] = merged.row_sum;
#pragma unroll
    for (int i = 0; i < VN; i++)
      if (lane + 32 * i < VD) mine[lane + 32 * i] = merged.x[i];
    sync_threads();
    if (warp % split) return;
    for (int w = 1; w < split; w++) {
      const float* theirs = mine + w * (VD + 2);
      float v[VN];
#pragma unroll
      for (int i = 0; i < VN; i++) v[i] = lane + 32 * i < VD ? theirs[lane + 32 * i] : 0.0f;
      merged.add(theirs[VD], theirs[VD + 1], v);
    }
  }
  if (head < query_heads) write_row(args, row, head, merged.highest, merged.row_sum, merged.x, mine, lane);
}
HOST_TESTABLE(merge, DecodeArgs)
