// Merges the partial results of a (query, head) and writes its output, unless a single thread block of `attend` already
// has. Blocks are small: they fit beside those of `attend` and have loaded their metadata when the last of those ends.
//
// `merge` visits all rows. args.merge_split warps share the partial results of a row, so that few rows with many of
// them do not load serially. `merge_cuts` visits the boundaries between thread blocks of `attend`: with many work
// tiles, most lie within one block, and only those that cross a boundary need a merge.
#pragma once
#include "decode/output.cuh"

constexpr int MERGE_WARPS = 2, PARTS_AT_ONCE = VD > 128 ? 3 : 4;
constexpr int MERGE_BLOCKS = 16;  // limits registers to 64, so that a block fits beside eight warps of 224

// Merges a column's partial results `from`, `from` + `by`, ... of a work tile.
DEVICE MergedState merge_parts(const DecodeArgs& args, const Partials& parts, int column, int from, int by, int lane) {
  MergedState merged;
  merged.clear();
  if (SPLITS) {  // with one maximum from the start, partial results without keys change nothing
    for (int i = lane; i < parts.count; i += 32)
      merged.highest = max_f32(merged.highest, args.part_states[2 * ((i64)(parts.first + i) * COLUMNS + column)]);
    UNROLL_FOR (int d = 16; d; d >>= 1) merged.highest = max_f32(merged.highest, shfl_xor(merged.highest, d));
  }
  for (int i = from; i < parts.count; i += PARTS_AT_ONCE * by) {
    float m[PARTS_AT_ONCE], l[PARTS_AT_ONCE], v[PARTS_AT_ONCE][VN];
    UNROLL_FOR (int j = 0; j < PARTS_AT_ONCE; j++) {
      const bool real = i + j * by < parts.count;
      const i64 part = (i64)(parts.first + (real ? i + j * by : i)) * COLUMNS + column;
      m[j] = real ? args.part_states[2 * part] : MINUS_INFINITY;
      l[j] = real ? args.part_states[2 * part + 1] : 0.0f;
      UNROLL_FOR (int d = 0; d < VN; d++)
        v[j][d] = real && lane + 32 * d < VD ? args.parts[part * VD + lane + 32 * d] : 0.0f;
    }
    merged.add(m, l, v);
  }
  return merged;
}

KERNEL(32 * MERGE_WARPS, MERGE_BLOCKS) merge(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, split = args.merge_split;
  const int places = args.merge_places, head = block_index_y() * (MERGE_WARPS / split) + warp / split;
  const int query_heads = args.num_kv_heads * args.group_size;
  // No block may exit before `attend` has finished.
  if (!places && block_index() >= ldg_i32(args.cu_seqlens_q + args.num_seqs)) return griddepcontrol_wait();
  const int b = places ? block_index() / places : sequence_of(args, block_index());
  const Sequence s = sequence_at(args, b);
  const int query = places ? block_index() % places : block_index() - s.start, row = s.start + query;
  if (s.tiles == 0 || query >= s.queries) return griddepcontrol_wait();  // prefilled by another kernel
  const int per_chunk = args.queries_of_chunk, chunk = small_quotient(query, per_chunk);
  const int column = (query - chunk * per_chunk) * args.group_size + in_group(args, head);
  Partials parts = decode_partials(args, b, chunk * args.num_kv_heads + by_group(args, head), lane);
  if (head >= query_heads) parts.count = 0;
  griddepcontrol_wait();
  if (WHOLE_TILES && parts.count == 1) return;

  MergedState merged = merge_parts(args, parts, column, warp % split, split, lane);
  float* mine = (float*)shared + warp * (VD + 4);
  if (split > 1) {
    if (lane == 0) mine[VD] = merged.highest, mine[VD + 1] = merged.row_sum;
    UNROLL_FOR (int i = 0; i < VN; i++)
      if (lane + 32 * i < VD) mine[lane + 32 * i] = merged.x[i];
    sync_threads();
    if (warp % split) return;
    for (int w = 1; w < split; w++) {
      const float* theirs = mine + w * (VD + 4);
      const float m[1] = {theirs[VD]}, l[1] = {theirs[VD + 1]};
      float v[1][VN];
      UNROLL_FOR (int i = 0; i < VN; i++) v[0][i] = lane + 32 * i < VD ? theirs[lane + 32 * i] : 0.0f;
      merged.add(m, l, v);
    }
  }
  if (head < query_heads) write_row(args, row, head, merged.highest, merged.row_sum, merged.x, mine, lane);
}
HOST_TESTABLE(merge, DecodeArgs)

// Block x merges the first work tile that crosses the boundary between blocks x and x + 1 of `attend`. Blocks also
// write the rows of sequences without keys, which `attend` does not process.
KERNEL(32 * MERGE_WARPS, MERGE_BLOCKS) merge_cuts(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, cut = block_index() + 1;
  const int column = block_index_y() * MERGE_WARPS + warp, per_chunk = args.queries_of_chunk;
  const int of_chunk = by_group(args, column), of_group = in_group(args, column);
  WorkPartition partition;
  int left;
  const DecodeRange range(args, first_range(args, cut, args.blocks, lane, partition, left));
  const int query = range.chunk * per_chunk + of_chunk;
  const bool here =
      left > 0 && range.first > 0 && range.first <= partition.share && of_chunk < per_chunk && query < range.s.queries;
  const Partials parts = {range.number + cut - 1, 2 + (range.s.kv_blocks - range.first - 1) / partition.share};
  float* scratch = (float*)shared + warp * VD;
  MergedState none;
  none.clear();
  for (int b = block_index(); b < args.num_seqs; b += block_count()) {
    const Sequence s = sequence_at(args, b);
    if (s.kv_blocks || s.tiles == 0) continue;
    for (int i = of_chunk; i < s.queries && of_chunk < per_chunk; i += per_chunk)
      for (int head = of_group; head < args.num_kv_heads * args.group_size; head += args.group_size)
        write_row(args, s.start + i, head, none.highest, none.row_sum, none.x, scratch, lane);
  }
  griddepcontrol_wait();
  if (!here) return;
  const MergedState merged = merge_parts(args, parts, column, 0, 1, lane);
  write_row(args, range.s.start + query, range.head * args.group_size + of_group, merged.highest, merged.row_sum,
      merged.x, scratch, lane);
}
HOST_TESTABLE(merge_cuts, DecodeArgs)
