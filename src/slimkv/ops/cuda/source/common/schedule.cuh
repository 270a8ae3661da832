// The split-KV schedule of attention over sequences of any lengths. A work tile is some query rows of one sequence,
// with the KV blocks they see. The concatenated KV blocks of all work tiles are partitioned evenly over the thread
// blocks. Every thread block computes its range on the device, so a CUDA graph can be replayed with other lengths.
//
// Includers define before it:
//   Sequence                  with `tiles` (its work tiles) and `kv_blocks` (per work tile)
//   sequence_at(args, b)      with args.num_seqs sequences
//   from_lane(sequence, lane) broadcasts a Sequence
//   PAD_TILES                 whether work tiles may be padded (see WorkPartition)
#pragma once
#include "common/intrinsics.cuh"

// In positions: the cost of starting a work tile; the part of it that a thread block with a single work tile saves; the
// smallest share of a thread block; and by how much a share may grow so that thread blocks have whole work tiles.
// Includers define costs_of(args).
struct WorkCosts { int tile, tile_switch, min_share, whole; };

// Every thread block takes `share` positions: one per KV block and, before the first one of a work tile, `cost`.
// Padded: work tiles start at thread block boundaries, if that is nearly as even. A thread block that continues with
// another work tile would wait for its queries and pages, and delay the whole grid.
struct WorkPartition {
  i32 total;  // positions
  int share;
  bool padded;
  int cost;
  DEVICE_MEMBER int lead() const { return padded ? 0 : cost; }  // positions before a work tile's KV blocks
  DEVICE_MEMBER int positions(int kv_blocks) const {
    return padded ? small_quotient(kv_blocks + share - 1, share) * share : kv_blocks ? kv_blocks + lead() : 0;
  }
};

// The total KV blocks, the number of non-empty work tiles, and the largest number of KV blocks of a work tile.
struct WorkTotals { i32 kv_blocks, tiles, longest; };
DEVICE WorkTotals add_sequence(WorkTotals sums, const Sequence& s) {
  const i32 tiles = s.kv_blocks ? s.tiles : 0;
  return {sums.kv_blocks + tiles * s.kv_blocks, sums.tiles + tiles, max_i32(sums.longest, s.kv_blocks)};
}

// The partition for the totals summed over all lanes.
DEVICE WorkPartition make_partition(WorkTotals sums, int blocks, WorkCosts costs) {
  UNROLL_FOR (int d = 16; d; d >>= 1) {
    sums.kv_blocks += shfl_xor(sums.kv_blocks, d), sums.tiles += shfl_xor(sums.tiles, d);
    if (PAD_TILES || costs.whole) sums.longest = max_i32(sums.longest, shfl_xor(sums.longest, d));
  }
  const i32 total = sums.kv_blocks + sums.tiles * costs.tile;
  WorkPartition even = {total, max_i32(costs.min_share, quotient(total + blocks - 1, blocks)), false, costs.tile};
  if (costs.whole) {
    const int one = sums.longest + costs.tile, whole = quotient(even.share + one - 1, one) * one;
    if (whole <= even.share + costs.whole) even.share = whole;
  }
  if (!PAD_TILES || sums.tiles == 0 || sums.tiles > blocks) return even;
  const int blocks_of_tile = small_quotient(blocks, sums.tiles);
  const int padded = max_i32(costs.min_share, small_quotient(sums.longest + blocks_of_tile - 1, blocks_of_tile));
  const int least = max_i32(costs.min_share, quotient(sums.kv_blocks + blocks - 1, blocks));
  return padded <= least + costs.tile_switch ? WorkPartition{sums.kv_blocks, padded, true, 0} : even;
}

// The partition, and the positions and work tiles of all sequences before b.
struct WorkOffset {
  WorkPartition partition;
  i32 positions, tiles;
};
template <class Args> DEVICE WorkOffset offset_of(const Args& args, int b, int blocks, int lane) {
  WorkTotals sums = {0, 0, 0};
  const WorkCosts costs = costs_of(args);
  i32 positions = 0, tiles = 0;
  for (int i = lane; i < args.num_seqs; i += 32) {
    const Sequence s = sequence_at(args, i);
    sums = add_sequence(sums, s);
    if (i < b) tiles += s.tiles, positions += s.kv_blocks ? s.tiles * (s.kv_blocks + costs.tile) : 0;
  }
  const WorkPartition partition = make_partition(sums, blocks, costs);
  if (partition.padded) {
    positions = 0;
    for (int i = lane; i < b; i += 32) {
      const Sequence s = sequence_at(args, i);
      positions += s.tiles * partition.positions(s.kv_blocks);
    }
  }
  UNROLL_FOR (int d = 16; d; d >>= 1) positions += shfl_xor(positions, d), tiles += shfl_xor(tiles, d);
  return {partition, positions, tiles};
}

// The work tiles of all sequences before b.
template <class Args> DEVICE int tiles_before(const Args& args, int b, int lane) {
  i32 tiles = 0;
  for (int i = lane; i < b; i += 32) tiles += sequence_at(args, i).tiles;
  UNROLL_FOR (int d = 16; d; d >>= 1) tiles += shfl_xor(tiles, d);
  return tiles;
}

// The indices of a work tile's partial results: `count` of them from `first` on, one per thread block of the tile.
struct Partials { int first, count; };
template <class Args> DEVICE Partials partials_of(const Args& args, int b, int tile, int lane) {
  const WorkOffset offset = offset_of(args, b, args.blocks, lane);
  const WorkPartition& partition = offset.partition;
  const int kv_blocks = sequence_at(args, b).kv_blocks;
  const int from = offset.positions + tile * partition.positions(kv_blocks) + partition.lead();
  const int first_block = quotient(from, partition.share);
  return {offset.tiles + tile + first_block,
      kv_blocks ? quotient(from + kv_blocks - 1, partition.share) + 1 - first_block : 0};
}

// KV blocks first .. last - 1 of a work tile.
struct WorkRange {
  int b;  // sequence
  int tile;  // index in the sequence
  int number;  // index among all work tiles
  int first, last;
  Sequence s;
};

// One warp: the first range of a thread block, and the block's positions (`left`, maybe 0). Scans 32 sequences at once.
template <class Args>
DEVICE WorkRange first_range(const Args& args, int block, int blocks, int lane, WorkPartition& partition, int& left) {
  Sequence s = {};
  if (lane < args.num_seqs) s = sequence_at(args, lane);
  if (args.num_seqs <= 32) partition = make_partition(add_sequence({0, 0, 0}, s), blocks, costs_of(args));
  else partition = offset_of(args, 0, blocks, lane).partition;
  const i32 from = block * partition.share;
  i32 positions = 0, tiles = 0;
  WorkRange range = {};
  left = 0;
  while (true) {
    const i32 of_tile = partition.positions(s.kv_blocks);
    i32 numbers = s.tiles, ends = numbers * of_tile;
    UNROLL_FOR (int d = 1; d < 32; d <<= 1) {
      const i32 more = shfl(ends, (lane - d) & 31), more_tiles = shfl(numbers, (lane - d) & 31);
      if (lane >= d) ends += more, numbers += more_tiles;
    }
    const int over = bit_count(warp_ballot(positions + ends <= from));  // sequences that end before the range begins
    const i32 positions_over = shfl(ends, (over - 1) & 31), tiles_over = shfl(numbers, (over - 1) & 31);
    if (over) positions += positions_over, tiles += tiles_over;
    if (over < 32) {
      range.b += over;
      range.s = from_lane(s, over);
      const int one = shfl(of_tile, over);
      range.tile = quotient(from - positions, one);
      range.number = tiles + range.tile;
      const int inside = from - positions - range.tile * one, before = max_i32(0, partition.lead() - inside);
      range.first = max_i32(0, inside - partition.lead());
      const int rest = partition.padded ? range.s.kv_blocks - range.first : partition.total - from;
      left = min_i32(partition.share, rest) - before;
      range.last = min_i32(range.s.kv_blocks, range.first + left);
      return range;
    }
    range.b += 32;
    if (range.b >= args.num_seqs) return range;
    s = {};
    if (range.b + lane < args.num_seqs) s = sequence_at(args, range.b + lane);
  }
}

// The index of a range's partial result.
DEVICE int part_of(const WorkRange& range) { return range.number + block_index(); }

// The next range. Precondition: one exists.
template <class Args> DEVICE WorkRange next_range(const Args& args, const WorkRange& range, int left) {
  WorkRange next = range;
  next.number++;
  if (++next.tile == range.s.tiles) {
    next.tile = 0;
    for (next.s = sequence_at(args, ++next.b); next.s.tiles == 0 || next.s.kv_blocks == 0;
        next.s = sequence_at(args, ++next.b))
      next.number += next.s.tiles;
  }
  next.first = 0;
  next.last = min_i32(next.s.kv_blocks, left);
  return next;
}
