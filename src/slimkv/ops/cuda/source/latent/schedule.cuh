// Who does what: the steps of all items, one after the other, are partitioned evenly over the blocks, whatever the sequences'
// lengths. An item is a tile of rows of one sequence.
//
// Whoever includes this has ROWS (rows of an item), STEP (tokens), ITEM_COST (what an item takes beside its steps, in steps) and
// PARTS (that a block leaves of an item).
#pragma once
#include "latent/args.cuh"

// Rows first .. of a sequence's (query, head) pairs.
struct Item {
  int sequence, first, start, queries, length, count;

  DEVICE_MEMBER Item(const LatentArgs& args, int sequence_, int tile) {
    sequence = sequence_;
    first = tile * ROWS;
    start = ldg_i32(args.cu_seqlens_q + sequence);
    queries = ldg_i32(args.cu_seqlens_q + sequence + 1) - start;
    length = ldg_i32(args.seq_lens + sequence);
    count = min_i32(ROWS, queries * args.heads - first);
  }
  // One past the last token that row n sees.
  DEVICE_MEMBER int visible_end(const LatentArgs& args, int n) const {
    return max_i32(min_i32(length, length - queries + (first + n) / args.heads + 1), 0);
  }
  DEVICE_MEMBER int steps(const LatentArgs& args) const {
    return count > 0 ? (visible_end(args, count - 1) + STEP - 1) / STEP : 0;
  }
};

// Positions of a sequence: one for every step and, before the first of an item, ITEM_COST. All its items count as the longest.
struct Extent {
  int tiles, steps;
  DEVICE_MEMBER int item() const { return steps + ITEM_COST; }
  DEVICE_MEMBER int all() const { return steps ? tiles * item() : 0; }
};
DEVICE Extent extent_of(const LatentArgs& args, int sequence) {
  const int queries = ldg_i32(args.cu_seqlens_q + sequence + 1) - ldg_i32(args.cu_seqlens_q + sequence);
  const int length = ldg_i32(args.seq_lens + sequence);
  return {(queries * args.heads + ROWS - 1) / ROWS, queries > 0 ? (max_i32(length, 0) + STEP - 1) / STEP : 0};
}

DEVICE int sum_of_warp(int x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += shfl_xor(x, d);
  return x;
}

// Positions of a block, and those before a sequence.
struct Share { int size, before; };
DEVICE Share share_of(const LatentArgs& args, int sequence, int lane) {
  int total = 0, before = 0;
  for (int i = lane; i < args.sequences; i += 32) {
    const int own = extent_of(args, i).all();
    total += own;
    if (i < sequence) before += own;
  }
  total = sum_of_warp(total), before = sum_of_warp(before);
  return {max_i32(ITEM_COST + 1, (total + args.blocks - 1) / args.blocks), before};
}

// Steps of an item that a block takes. Its results go to slot `part` and those behind it.
struct Range {
  int sequence, tile, first, last;
  DEVICE_MEMBER int part(const LatentArgs& args, int block) const { return PARTS * (sequence * args.row_tiles + tile + block); }
};

// The ranges of a block, one after the other.
struct Walk {
  int left;  // positions
  int sequence, tile, at;  // the next position, in the item
  Extent extent;

  DEVICE_MEMBER Walk(const LatentArgs& args, int block, int lane) {
    const int share = share_of(args, 0, lane).size;
    int from = block * share;
    left = share, sequence = 0, tile = 0, at = 0, extent = {0, 0};
    while (sequence < args.sequences) {  // 32 sequences at a time
      Extent own = {0, 0};
      if (sequence + lane < args.sequences) own = extent_of(args, sequence + lane);
      int ends = own.all();
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int more = shfl(ends, (lane - d) & 31);
        if (lane >= d) ends += more;
      }
      const int over = warp_count(ends <= from), passed = shfl(ends, (over - 1) & 31);
      if (over < 32) {
        extent = {shfl(own.tiles, over), shfl(own.steps, over)};
        from -= over ? passed : 0;
        sequence += over, tile = from / extent.item(), at = from % extent.item();
        return;
      }
      from -= passed;
      sequence += 32;
    }
    left = 0;
  }

  // The next range with steps, if there is one.
  DEVICE_MEMBER bool next(const LatentArgs& args, Range& range) {
    while (left > 0) {
      if (tile == extent.tiles || !extent.steps) {
        if (++sequence >= args.sequences) return false;
        extent = extent_of(args, sequence), tile = 0, at = 0;
        continue;
      }
      const int taken = min_i32(left, extent.item() - at), first = max_i32(0, at - ITEM_COST), last = at + taken - ITEM_COST;
      range = {sequence, tile, first, last};
      left -= taken;
      if (at + taken == extent.item()) at = 0, tile++;
      else at += taken;
      if (first < last) return true;
    }
    return false;
  }
};

// Where the block is. One thread goes on for all: the others have no registers to spare, and where the compiler sees that all lanes
// do the same, descriptors stay in registers of the warp.
struct Route {
  Walk walk;
  Range range;  // of no sequence at the end

  DEVICE_MEMBER Range common_range() const {
    return {shfl(range.sequence, 0), shfl(range.tile, 0), shfl(range.first, 0), shfl(range.last, 0)};
  }
  DEVICE_MEMBER void go_on(const LatentArgs& args) {
    Walk own = walk;
    Range next;
    if (!own.next(args, next)) next.sequence = -1;
    walk = own, range = next;
  }
};
