// Work of the latent kernels: a work tile is ROWS query rows of one sequence.
//
// Includers define ROWS, KV_BLOCK (tokens) and TILE_COST.
#pragma once
#include "latent/args.cuh"

// A work tile: `count` query rows (query, head) from first_row on.
struct WorkTile {
  int sequence, first_row, start, queries, length;
  int count;  // rows

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

// Every work tile of a sequence counts as many KV blocks as the last one, and at least one, so outputs are written.
struct Sequence { int tiles, kv_blocks; };
DEVICE Sequence sequence_at(const LatentArgs& args, int b) {
  const int queries = ldg_i32(args.cu_seqlens_q + b + 1) - ldg_i32(args.cu_seqlens_q + b);
  const int length = ldg_i32(args.seq_lens + b);
  return {(queries * args.num_heads + ROWS - 1) / ROWS,
      queries > 0 ? (max_i32(length, 1) + KV_BLOCK - 1) / KV_BLOCK : 0};
}
DEVICE Sequence from_lane(const Sequence& s, int lane) { return {shfl(s.tiles, lane), shfl(s.kv_blocks, lane)}; }

// With fewer KV blocks per thread block, merging costs more than splitting saves.
constexpr int MIN_SHARE = KV_BLOCK < 64 ? 5 : 2;
constexpr bool PAD_TILES = false;
#include "common/schedule.cuh"
DEVICE WorkCosts costs_of(const LatentArgs&) { return {TILE_COST, TILE_COST, MIN_SHARE, TILE_COST + 2}; }

// Whether `merge` visits only the work tiles that one thread block begins and another ends, at most one per block. It
// does if there are more work tiles than thread blocks; otherwise it visits all work tiles.
DEVICE bool merges_by_block(const LatentArgs& args) {
  return args.direct && args.num_seqs * args.row_tiles > args.blocks;
}
// An entry of args.tiles: a work tile and its partial results, `count` of them from `first` on.
struct __attribute__((aligned(16))) TileParts { i32 sequence, tile, first, count; };

// The successive ranges of a thread block; range.b is -1 after the last one.
struct WorkRanges {
  WorkRange range;
  int left;  // positions from the range's first KV block on

  DEVICE_MEMBER WorkRanges() {}
  DEVICE_MEMBER WorkRanges(const LatentArgs& args, int lane) {
    WorkPartition partition;
    take_first(args, lane, partition);
  }
  // Called by a whole warp.
  DEVICE_MEMBER void take_first(const LatentArgs& args, int lane, WorkPartition& partition) {
    range = first_range(args, block_index(), args.blocks, lane, partition, left);
    if (left <= 0) range.b = -1;
  }
  DEVICE_MEMBER void advance(const LatentArgs& args) {
    left -= range.last - range.first + TILE_COST;  // and the cost of the next work tile
    if (left > 0) range = next_range(args, range, left);
    else range.b = -1;
  }
};

// WorkRanges that are announced to `merge`: one thread of the block (`tells`) lists the work tiles that they begin.
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
    const int rest = range.s.kv_blocks - range.last;  // KV blocks of later thread blocks
    const bool by_block = merges_by_block(args);
    if (!tells || range.b < 0 || range.first > 0 || (by_block && rest == 0)) return;
    TileParts* const entries = (TileParts*)args.tiles;
    entries[by_block ? block_index() : range.b * args.row_tiles + range.tile] = {range.b, range.tile, part_of(range),
        1 + quotient(rest + share - 1, share)};
  }
};

// Reads a range in shared memory, where one thread advances it for all, to save registers. The compiler knows values
// broadcast from one lane to be uniform, so descriptors stay in uniform registers.
DEVICE WorkRange broadcast(const WorkRange& range) {
  return {shfl(range.b, 0), shfl(range.tile, 0), shfl(range.number, 0), shfl(range.first, 0), shfl(range.last, 0),
      from_lane(range.s, 0)};
}
