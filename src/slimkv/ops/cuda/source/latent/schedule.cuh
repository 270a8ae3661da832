// Work of the latent kernels: a work tile is ROWS query rows of one sequence.
//
// Includers define ROWS, KV_BLOCK (tokens) and TILE_COST.
#pragma once
#include "latent/args.cuh"

// Query rows (query, head) from first_row on.
struct WorkTile {
  int sequence, first_row, start, queries, length;
  int count;  // of rows

  DEVICE_MEMBER WorkTile(const LatentArgs& args, int sequence_, int tile) {
    sequence = sequence_;
    first_row = tile * ROWS;
    start = ldg_i32(args.cu_seqlens_q + sequence);
    queries = ldg_i32(args.cu_seqlens_q + sequence + 1) - start;
    length = ldg_i32(args.seq_lens + sequence);
    count = min_i32(ROWS, queries * args.num_heads - first_row);
  }
  // One past the last token that row n sees.
  DEVICE_MEMBER int visible_end(const LatentArgs& args, int n) const {
    return max_i32(min_i32(length, length - queries + (first_row + n) / args.num_heads + 1), 0);
  }
  DEVICE_MEMBER int kv_blocks(const LatentArgs& args) const {
    return count > 0 ? (visible_end(args, count - 1) + KV_BLOCK - 1) / KV_BLOCK : 0;
  }
};

// All work tiles of a sequence count as many KV blocks as its last one, and one at least: somebody writes its output.
struct Sequence { int tiles, kv_blocks; };
DEVICE Sequence sequence_at(const LatentArgs& args, int b) {
  const int queries = ldg_i32(args.cu_seqlens_q + b + 1) - ldg_i32(args.cu_seqlens_q + b);
  const int length = ldg_i32(args.seq_lens + b);
  return {(queries * args.num_heads + ROWS - 1) / ROWS,
      queries > 0 ? (max_i32(length, 1) + KV_BLOCK - 1) / KV_BLOCK : 0};
}
DEVICE Sequence from_lane(const Sequence& s, int lane) { return {shfl(s.tiles, lane), shfl(s.kv_blocks, lane)}; }

// Fewer KV blocks of a thread block leave more to merge than they save.
constexpr int MIN_SHARE = KV_BLOCK < 64 ? 5 : 2;
constexpr bool PAD_TILES = false;
#include "common/schedule.cuh"
DEVICE WorkCosts costs_of(const LatentArgs&) { return {TILE_COST, TILE_COST, MIN_SHARE, TILE_COST + 2}; }

// Which work tiles `merge` looks at: that one, if any, which a thread block begins and others end, where work tiles are
// more than thread blocks; otherwise all.
DEVICE bool merges_by_block(const LatentArgs& args) {
  return args.direct && args.num_seqs * args.row_tiles > args.blocks;
}
// An entry of args.tiles: a work tile and its partial results, `count` of them from `first` on.
struct __attribute__((aligned(16))) TileParts { i32 sequence, tile, first, count; };

// The ranges of a thread block, one after the other; range.b is -1 behind the last one.
struct WorkRanges {
  WorkRange range;
  int left;  // positions from its first KV block on

  DEVICE_MEMBER WorkRanges() {}
  DEVICE_MEMBER WorkRanges(const LatentArgs& args, int lane) {
    WorkPartition partition;
    take_first(args, lane, partition);
  }
  // By a whole warp.
  DEVICE_MEMBER void take_first(const LatentArgs& args, int lane, WorkPartition& partition) {
    range = first_range(args, block_index(), args.blocks, lane, partition, left);
    if (left <= 0) range.b = -1;
  }
  DEVICE_MEMBER void advance(const LatentArgs& args) {
    left -= range.last - range.first + TILE_COST;  // with what the next work tile costs
    if (left > 0) range = next_range(args, range, left);
    else range.b = -1;
  }
};

// The same; one thread of the block (`tells`) tells `merge` which work tiles the ranges begin.
struct AnnouncedRanges : WorkRanges {
  int share;  // positions of a thread block
  bool tells;

  DEVICE_MEMBER AnnouncedRanges(const LatentArgs& args, int lane, bool tells_) : tells(tells_) {
    WorkPartition partition;
    take_first(args, lane, partition);
    share = partition.share;
    if (tells && merges_by_block(args)) ((TileParts*)args.tiles)[block_index()].count = 0;
    announce(args);
  }
  DEVICE_MEMBER void advance(const LatentArgs& args) {
    WorkRanges::advance(args);
    announce(args);
  }
  DEVICE_MEMBER void announce(const LatentArgs& args) const {
    const int rest = range.s.kv_blocks - range.last;  // KV blocks of the thread blocks behind this one
    const bool by_block = merges_by_block(args);
    if (!tells || range.b < 0 || range.first > 0 || (by_block && rest == 0)) return;
    TileParts* const entries = (TileParts*)args.tiles;
    entries[by_block ? block_index() : range.b * args.row_tiles + range.tile] = {range.b, range.tile, part_of(range),
        1 + quotient(rest + share - 1, share)};
  }
};

// A range in shared memory, which one thread advances for all: the others have no registers to spare. Values broadcast
// from one lane are known to be uniform, so descriptors stay in uniform registers.
DEVICE WorkRange broadcast(const WorkRange& range) {
  return {shfl(range.b, 0), shfl(range.tile, 0), shfl(range.number, 0), shfl(range.first, 0), shfl(range.last, 0),
      from_lane(range.s, 0)};
}
