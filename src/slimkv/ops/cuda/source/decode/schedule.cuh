// Who does what. Work is cut into steps of 16 NT tokens of one KV head. All steps of all sequences, one after the other,
// are partitioned evenly over the blocks, whatever the sequences' lengths.
#pragma once
#include "decode/shape.cuh"

// Quotients of numbers that are not negative. Instructions that a block meets once come from memory, which takes longer than running
// them, and those of n / d are 22.
DEVICE int small_quotient(int n, int d) { return (int)(((float)n + 0.5f) * rcp_approx((float)d)); }  // n < 2^20: 0.5 / d from any integer
DEVICE int quotient(int n, int d) {
  const float inverse = rcp_approx((float)d);
  int q = (int)((float)n * inverse);
  q += (int)((float)(n - q * d) * inverse);  // one more or less now
  const int left = n - q * d;
  return q + (left >= d) - (left < 0);
}
// Of a column of a chunk its query, of a query head its KV head: below 2^11 of either.
DEVICE int by_group(const DecodeArgs& args, int column) { return column * args.group_inverse >> 16; }
DEVICE int in_group(const DecodeArgs& args, int column) { return column - by_group(args, column) * args.group_size; }

struct Sequence {
  int start, queries, length;
  int begin;   // the first token that is looked at, a multiple of a step
  int steps;   // of one head
  int chunks;  // of queries that are attended together
};

DEVICE Sequence sequence_at(const DecodeArgs& args, int b) {
  Sequence s;
  s.start = ldg_i32(args.cu_seqlens_q + b);
  s.queries = ldg_i32(args.cu_seqlens_q + b + 1) - s.start;
  s.length = ldg_i32(args.seq_lens + b);
  s.begin = 0;
  if (WINDOW) s.begin = max_i32(0, s.length - s.queries - args.sliding_window + 1) / STEP * STEP;
  const int per_chunk = args.queries_of_chunk;
  const bool ours = s.queries > 0 && s.queries <= args.max_decode_queries;
  s.chunks = ours ? small_quotient(s.queries + per_chunk - 1, per_chunk) : 0;
  s.steps = ours ? (max_i32(0, s.length - s.begin) + STEP - 1) / STEP : 0;
  return s;
}

// What it costs to go on to another item, in steps of a block, and with the idle warps of its last steps.
constexpr int ITEM_SWITCH_COST = VERIFY ? 2 * RINGS : WARPS + WARPS / 4, ITEM_COST = ITEM_SWITCH_COST + RINGS / 2;

// An item is a KV head of a sequence (and of a chunk of its queries). Every block takes `share` positions, of which
// there is one for every step and, before the first of them, ITEM_COST for what every item takes. Where whole blocks for
// every item come out nearly as even, items are padded to such: a block that goes on to another item waits for its queries
// and pages, and all others wait for that block.
struct WorkPartition {
  i32 total;  // positions
  int share;
  bool padded;
  DEVICE_MEMBER int lead() const { return padded ? 0 : ITEM_COST; }  // positions before an item's steps
  DEVICE_MEMBER int positions(int steps) const {
    return padded ? small_quotient(steps + share - 1, share) * share : steps ? steps + lead() : 0;
  }
};

DEVICE WorkPartition make_partition(i32 steps, i32 items, i32 longest, int blocks) {
  const i32 total = steps + items * ITEM_COST;
  const WorkPartition costs = {total, max_i32(1, quotient(total + blocks - 1, blocks)), false};
  if (items == 0 || items > blocks) return costs;
  const int even = max_i32(1, quotient(steps + blocks - 1, blocks));
  const int blocks_of_item = small_quotient(blocks, items), own = small_quotient(longest + blocks_of_item - 1, blocks_of_item);
  return own <= even + ITEM_SWITCH_COST ? WorkPartition{steps, own, true} : costs;
}

struct WorkTotals {
  i32 steps, items, longest;  // of all heads and chunks: steps, items that have some, the most steps of one
};

// Of the sequences of a warp's lanes; every lane gets them.
DEVICE WorkTotals reduce_totals(WorkTotals sums) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    sums.steps += shfl_xor(sums.steps, d), sums.items += shfl_xor(sums.items, d);
    sums.longest = max_i32(sums.longest, shfl_xor(sums.longest, d));
  }
  return sums;
}

DEVICE WorkTotals add_sequence(WorkTotals sums, const Sequence& s, int heads) {
  const i32 items = s.steps ? s.chunks * heads : 0;
  return {sums.steps + items * s.steps, sums.items + items, max_i32(sums.longest, s.steps)};
}

struct WorkOffset {
  WorkPartition partition;
  i32 positions, items;  // of the sequences before one
};

// The partition, and where sequence b begins in it.
DEVICE WorkOffset offset_of(const DecodeArgs& args, int b, int blocks, int lane) {
  WorkTotals sums = {0, 0, 0};
  i32 positions = 0, items = 0;
  for (int i = lane; i < args.num_seqs; i += 32) {
    const Sequence s = sequence_at(args, i);
    sums = add_sequence(sums, s, args.num_kv_heads);
    if (i < b) {
      items += s.chunks * args.num_kv_heads;
      positions += s.steps ? s.chunks * args.num_kv_heads * (s.steps + ITEM_COST) : 0;
    }
  }
  sums = reduce_totals(sums);
  const WorkPartition partition = make_partition(sums.steps, sums.items, sums.longest, blocks);
  if (partition.padded) {
    positions = 0;
    for (int i = lane; i < b; i += 32) {
      const Sequence s = sequence_at(args, i);
      positions += s.chunks * args.num_kv_heads * partition.positions(s.steps);
    }
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) positions += shfl_xor(positions, d), items += shfl_xor(items, d);
  return {partition, positions, items};
}

// The sequence of a row of queries: mostly every sequence has one.
DEVICE int sequence_of(const DecodeArgs& args, int row) {
  int b = min_i32(row, args.num_seqs - 1);
  if (ldg_i32(args.cu_seqlens_q + b) <= row && row < ldg_i32(args.cu_seqlens_q + b + 1)) return b;
  b = 0;
  for (int high = args.num_seqs; high - b > 1;) {
    const int middle = (b + high) / 2;
    if (ldg_i32(args.cu_seqlens_q + middle) <= row) b = middle; else high = middle;
  }
  return b;
}

// A run of steps of one (sequence, chunk of queries, head).
struct WorkRange {
  int b, chunk, head;
  Sequence s;
  int item;         // number of the (sequence, chunk, head)
  int first, last;  // steps
};

// A block of `attend`, from inside and from elsewhere.
struct ThisBlock {
  DEVICE_MEMBER int number() const { return block_index(); }
  DEVICE_MEMBER int count() const { return block_count(); }
};
struct BlockOf {
  int block, blocks;
  DEVICE_MEMBER int number() const { return block; }
  DEVICE_MEMBER int count() const { return blocks; }
};

// How work is cut, the first range of a block, and how many steps it gets in all, which may be none. 32 sequences at a time.
template <class Block> DEVICE WorkRange first_range(const DecodeArgs& args, Block block, int lane, WorkPartition& partition, int& left) {
  const bool few = args.num_seqs <= 32;  // a single look at them is enough
  Sequence s = {};
  if (lane < args.num_seqs) s = sequence_at(args, lane);
  if (few) {
    const WorkTotals sums = reduce_totals(add_sequence({0, 0, 0}, s, args.num_kv_heads));
    partition = make_partition(sums.steps, sums.items, sums.longest, block.count());
  } else partition = offset_of(args, 0, block.count(), lane).partition;
  const i32 from = block.number() * partition.share;
  i32 positions = 0, items = 0;
  WorkRange range = {};
  left = 0;
  while (true) {
    const i32 positions_of_item = partition.positions(s.steps);
    i32 numbers = s.chunks * args.num_kv_heads, ends = numbers * positions_of_item;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const i32 more = shfl(ends, (lane - d) & 31), more_items = shfl(numbers, (lane - d) & 31);
      if (lane >= d) ends += more, numbers += more_items;
    }
    const int over = warp_count(positions + ends <= from);  // how many of them end before the range begins
    const i32 positions_over = shfl(ends, (over - 1) & 31), items_over = shfl(numbers, (over - 1) & 31);
    if (over) positions += positions_over, items += items_over;
    if (over < 32) {
      range.b += over;
      range.s = {shfl(s.start, over), shfl(s.queries, over), shfl(s.length, over),
                 WINDOW ? shfl(s.begin, over) : 0, shfl(s.steps, over), shfl(s.chunks, over)};
      const int one = shfl(positions_of_item, over), within = quotient(from - positions, one);
      range.chunk = small_quotient(within, args.num_kv_heads);
      range.head = within - range.chunk * args.num_kv_heads;
      range.item = items + within;
      const int inside = from - positions - within * one, before = max_i32(0, partition.lead() - inside);
      range.first = max_i32(0, inside - partition.lead());
      left = min_i32(partition.share, partition.padded ? range.s.steps - range.first : partition.total - from) - before;
      range.last = min_i32(range.s.steps, range.first + left);
      break;
    }
    range.b += 32;
    if (range.b >= args.num_seqs) break;
    s = {};
    if (range.b + lane < args.num_seqs) s = sequence_at(args, range.b + lane);
  }
  return range;
}

// Next work range. Precondition: one exists.
DEVICE WorkRange next_range(const DecodeArgs& args, const WorkRange& range, int most) {
  WorkRange next = range;
  next.item++;
  if (++next.head == args.num_kv_heads) {
    next.head = 0;
    if (++next.chunk == range.s.chunks) {
      next.chunk = 0;
      for (next.s = sequence_at(args, ++next.b); next.s.chunks == 0 || next.s.steps == 0; next.s = sequence_at(args, ++next.b))
        next.item += next.s.chunks * args.num_kv_heads;
    }
  }
  next.first = 0;
  next.last = min_i32(next.s.steps, most);
  return next;
}
