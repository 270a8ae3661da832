// The schedule. A work tile is ROWS query rows of one sequence. The KV blocks of all work tiles, one after the other,
// are partitioned evenly over the thread blocks, whatever the lengths of the sequences.
//
// Includers define ROWS, KV_BLOCK (tokens) and TILE_COST (what starting a work tile costs, in KV blocks).
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

// Work is measured in positions: one for a KV block, and TILE_COST before the first one of a work tile. All work tiles
// of a sequence count as many KV blocks as its last one.
struct Sequence {
  int tiles, kv_blocks;
  DEVICE_MEMBER int tile_positions() const { return kv_blocks + TILE_COST; }
  DEVICE_MEMBER int positions() const { return kv_blocks ? tiles * tile_positions() : 0; }
};
DEVICE Sequence sequence_at(const LatentArgs& args, int b) {
  const int queries = ldg_i32(args.cu_seqlens_q + b + 1) - ldg_i32(args.cu_seqlens_q + b);
  const int length = ldg_i32(args.seq_lens + b);
  return {(queries * args.num_heads + ROWS - 1) / ROWS,
          queries > 0 ? (max_i32(length, 0) + KV_BLOCK - 1) / KV_BLOCK : 0};
}

DEVICE int sum_of_warp(int x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += shfl_xor(x, d);
  return x;
}

// Positions of every thread block, and of the sequences before one.
struct WorkOffset { int share, positions; };
DEVICE WorkOffset offset_of(const LatentArgs& args, int b, int lane) {
  int total = 0, before = 0;
  for (int i = lane; i < args.num_seqs; i += 32) {
    const int positions = sequence_at(args, i).positions();
    total += positions;
    if (i < b) before += positions;
  }
  total = sum_of_warp(total), before = sum_of_warp(before);
  return {max_i32(TILE_COST + 1, (total + args.blocks - 1) / args.blocks), before};
}

// KV blocks first .. last - 1 of a work tile, for one thread block.
struct WorkRange {
  int sequence, tile, first, last;
  // Number of its partial result.
  DEVICE_MEMBER int part(const LatentArgs& args, int block) const { return sequence * args.row_tiles + tile + block; }
};

// The ranges of a thread block, one after the other.
struct WorkRanges {
  int left;                // positions
  int sequence, tile, at;  // the next position, in the work tile
  Sequence own;

  DEVICE_MEMBER WorkRanges(const LatentArgs& args, int block, int lane) {
    const int share = offset_of(args, 0, lane).share;
    int from = block * share;
    left = share, sequence = 0, tile = 0, at = 0, own = {0, 0};
    while (sequence < args.num_seqs) {  // 32 sequences at a time
      Sequence s = {0, 0};
      if (sequence + lane < args.num_seqs) s = sequence_at(args, sequence + lane);
      int ends = s.positions();
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int more = shfl(ends, (lane - d) & 31);
        if (lane >= d) ends += more;
      }
      const int over = warp_count(ends <= from), passed = shfl(ends, (over - 1) & 31);
      if (over < 32) {
        own = {shfl(s.tiles, over), shfl(s.kv_blocks, over)};
        from -= over ? passed : 0;
        sequence += over, tile = from / own.tile_positions(), at = from % own.tile_positions();
        return;
      }
      from -= passed;
      sequence += 32;
    }
    left = 0;
  }

  // The next range that has KV blocks; false at the end.
  DEVICE_MEMBER bool next(const LatentArgs& args, WorkRange& range) {
    while (left > 0) {
      if (tile == own.tiles || !own.kv_blocks) {
        if (++sequence >= args.num_seqs) return false;
        own = sequence_at(args, sequence), tile = 0, at = 0;
        continue;
      }
      const int taken = min_i32(left, own.tile_positions() - at);
      const int first = max_i32(0, at - TILE_COST), last = at + taken - TILE_COST;
      range = {sequence, tile, first, last};
      left -= taken;
      if (at + taken == own.tile_positions()) at = 0, tile++;
      else at += taken;
      if (first < last) return true;
    }
    return false;
  }
};

// The range that warpgroups of a block attend together, in shared memory. One thread advances it: the others have no
// registers to spare. Values broadcast from one lane are known to be uniform, so descriptors stay in uniform registers.
struct SharedRange {
  WorkRanges ranges;
  WorkRange range;  // of sequence -1 at the end

  DEVICE_MEMBER WorkRange broadcast() const {
    return {shfl(range.sequence, 0), shfl(range.tile, 0), shfl(range.first, 0), shfl(range.last, 0)};
  }
  DEVICE_MEMBER void advance(const LatentArgs& args) {
    WorkRanges own = ranges;
    WorkRange next;
    if (!own.next(args, next)) next.sequence = -1;
    ranges = own, range = next;
  }
};
