// Split-KV for FUSED: if multiprocessors would be idle, work tiles (a block of queries and a KV head of a sequence) are
// divided into equal splits. Each thread block writes its softmax state to device memory, and `merge` merges those of a
// work tile. Splits are computed on the device, so a CUDA graph can be replayed with other lengths.
#pragma once
#include "prefill/args.cuh"

constexpr int LEAST_SHARE = 512 / STEP;  // tiles; with fewer, the start and the merge of blocks dominate

struct SplitSequence {
  PrefillSequence s;
  int work_tiles;
  int tiles;  // tiles of keys per work tile
  DEVICE_MEMBER int splits(int share) const { return max_i32(1, quotient(tiles + share - 1, share)); }
};
DEVICE SplitSequence split_sequence_at(const PrefillArgs& args, int i) {
  SplitSequence found = {{0, 0, 0, 0}, 0, 0};
  if (i >= args.num_seqs) return found;
  found.s = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, i);
  if (found.s.queries <= args.max_decode_queries) return found;
  const int queries_of_block = ROWS / args.group_size;
  found.work_tiles = (found.s.queries + queries_of_block - 1) / queries_of_block * args.num_kv_heads;
  found.tiles = max_i32(0, (found.s.length + STEP - 1) / STEP - origin_of(args, found.s));
  return found;
}

// The smallest number of tiles per block for which the blocks suffice.
DEVICE int share_of(const PrefillArgs& args, int lane) {
  if (!args.blocks) return 1 << 20;  // one block per work tile
  u32 longest = LEAST_SHARE;
#pragma unroll 1
  for (int i = lane; i < args.num_seqs; i += 32) longest = max_i32(longest, split_sequence_at(args, i).tiles);
  int low = LEAST_SHARE, high = (int)warp_max(longest);
#pragma unroll 1
  while (low < high) {
    const int share = (low + high) / 2;
    u32 blocks = 0;
#pragma unroll 1
    for (int i = lane; i < args.num_seqs; i += 32) {
      const SplitSequence own = split_sequence_at(args, i);
      blocks += own.work_tiles * own.splits(share);
    }
    if ((int)warp_sum(blocks) <= args.blocks) high = share;
    else low = share + 1;
  }
  return low;
}

// Finds the queries of a thread block and its split of their keys; false if it has none.
DEVICE bool find_queries(const PrefillArgs& args, int lane, Work& w) {
  const int share = share_of(args, lane);
  int left = block_index();
#pragma unroll 1
  for (int first = 0; first < args.num_seqs; first += 32) {
    const SplitSequence own = split_sequence_at(args, first + lane);
    int ends = own.work_tiles * own.splits(share);
    UNROLL_FOR (int d = 1; d < 32; d <<= 1) {
      const int before = shfl(ends, (lane - d) & 31);
      if (lane >= d) ends += before;
    }
    const int over = bit_count(warp_ballot(ends <= left)), before = shfl(ends, (over - 1) & 31);
    if (over == 32) {
      left -= before;
      continue;
    }
    if (over) left -= before;
    w.sequence = first + over;
    w.s = {shfl(own.s.start, over), shfl(own.s.queries, over), shfl(own.s.length, over), 0};
    w.splits = shfl(own.splits(share), over);
    const int work_tile = left / w.splits;
    w.split = left - work_tile * w.splits;
    w.head = work_tile % args.num_kv_heads;
    w.first = work_tile / args.num_kv_heads * (ROWS / args.group_size);
    return true;
  }
  return false;
}
