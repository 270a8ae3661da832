// The argument of the prefill kernels, and the items of the workspace.
//
// An item is a KV head of a sequence. Items of a pass are numbered in the order in which thread blocks process them:
// head by head, the last sequence first.
#pragma once
#include "common/codes.cuh"
#include "prefill/tiles.cuh"

enum Aligned { ALIGNED_OUTPUT = 1, ALIGNED_QUERIES = 2 };

// FUSED: for block x of `attend`, the states that `merge` merges: `splits` blocks from x on (0: none), for one head.
struct MergedSplits { i32 start, queries, head, first, splits; };

struct PrefillArgs {
  const void* query;
  u8* keys;  // [slot, tile], starting at the first tile that a query of the sequence sees
  u8* values;
  TileScale* tile_scales;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const float* sinks;  // per head or, for centred keys, per query and head; or null
  const float* score_shift;  // SCORE_SHIFT: per query and head
  void* out;
  float* lse;  // or null
  float* state;  // softmax state, HANDS_ON between passes or of splits: [blocks, PLACES / 2 + 4, 2 ROWS]
  MergedSplits* merged;  // one per block
  i64 query_stride, query_head_stride, out_stride, out_head_stride;
  i64 sink_stride;  // between queries: 0 or the number of heads
  float scale;  // softmax scale times log2(e)
  float softcap;  // times log2(e)
  float key_norm, value_norm;
  u32 key_sign_bits[8], value_sign_bits[8];
  i32 num_seqs, num_kv_heads, group_size, max_decode_queries, causal, sliding_window;
  i32 query_blocks, section;  // of the grid: query blocks, and KV heads processed concurrently
  i32 first_tile, tiles;  // for this pass: the first tile of each sequence, and the number of tiles
  i32 first_rank, ranks;  // for this pass: the first prefilled sequence, and the number of sequences
  i32 first_pass, last_pass;  // HANDS_ON
  i32 blocks;  // FUSED: thread blocks of split-KV (split.cuh); 0: one per work tile
  i32 aligned;  // enum Aligned: tensors that allow 16-byte accesses
  i32 slots;  // items that fit the workspace
  // For unpacking:
  const u8* pages;
  const i32* block_table;
  const float* key_levels;  // by code
  const float* value_levels;
  i64 page_stride, page_head_stride, table_stride;
  Table key_table, value_table;  // twice the magnitudes of levels of up to 4 bits; EIGHT_BIT: see unpack_bytes.cuh
  float value_factor;  // EIGHT_BIT: the factor that the values' level table includes
  const u16* key_signs;  // bf16 [D, D], the rotation's entries +-1
  const u16* value_signs;
  // AHEAD:
  i32* unpacked;  // groups of 16 tokens of each item
  i32* attended;  // blocks that have finished each item
  i32 lead;  // items unpacked before the first block
};

// The work tile of a thread block.
struct Work {
  PrefillSequence s;
  int sequence, head, first;  // first: query
  int tile, count;  // the last tile, and the number of tiles
  int origin;  // the first tile that any query of the sequence sees
  int clear_begin, clear_end;  // tokens that all queries of the block see
  int end;  // one past the last token that any query of the block sees
  int present;  // sequences of this pass
  int split, splits;  // FUSED: the split of the keys, and the number of splits
};

// The number of prefilled sequences in this pass.
DEVICE int present_of(const PrefillArgs& args, int lane) {
  u32 of_lane = 0;
#pragma unroll 1
  for (int i = lane; i < args.num_seqs; i += 32)
    of_lane += ldg_i32(args.cu_seqlens_q + i + 1) - ldg_i32(args.cu_seqlens_q + i) > args.max_decode_queries;
  return min_i32(args.ranks, (int)warp_sum(of_lane) - args.first_rank);
}

DEVICE int origin_of(const PrefillArgs& args, const PrefillSequence& s) {
  return WINDOW ? first_seen_tile(s, args.sliding_window) : 0;
}

DEVICE int item_of(const Work& w) { return w.head * w.present + w.present - 1 - w.s.rank; }

// The index in the workspace of tile 0 of the sequence, which may precede the stored tiles.
DEVICE i64 tiles_of(const PrefillArgs& args, const Work& w) {
  return (i64)(item_of(w) % args.slots) * args.tiles - w.origin - args.first_tile;
}

// The sequence and the head of an existing item.
DEVICE Work find_item(const PrefillArgs& args, int item, int present, int lane) {
  Work w;
  w.head = item / present, w.present = present;
  const int rank = present - 1 - item % present;
  w.sequence =
      sequence_of_rank(args.cu_seqlens_q, args.num_seqs, args.max_decode_queries, args.first_rank + rank, lane);
  w.s = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, w.sequence);
  w.s.rank = rank;
  w.origin = origin_of(args, w.s);
  return w;
}

DEVICE int end_tile_of(const Work& w) { return (w.s.length + STEP - 1) / STEP; }
