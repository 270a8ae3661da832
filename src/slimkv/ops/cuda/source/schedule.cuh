// Who does what. Work is cut into steps of 16 NT tokens of one KV head. All steps of all sequences form one line, of which
// every block gets an equal piece, whatever the sequences' lengths.
#pragma once
#include "decode_shape.cuh"

struct Sequence {
  int start, queries, length;
  int begin;   // the first token that is looked at, a multiple of a step
  int steps;   // of one head
  int chunks;  // of queries that are attended together
};

DEVICE Sequence sequence_at(const Args& args, int b) {
  Sequence s;
  s.start = load_int(args.starts + b);
  s.queries = load_int(args.starts + b + 1) - s.start;
  s.length = load_int(args.lengths + b);
  s.begin = 0;
  if (WINDOW) s.begin = greatest(0, s.length - s.queries - args.window + 1) / STEP * STEP;
  const int per_chunk = COLUMNS / args.group;
  const bool ours = s.queries > 0 && s.queries <= args.most_queries;
  s.chunks = ours ? (s.queries + per_chunk - 1) / per_chunk : 0;
  s.steps = ours ? (greatest(0, s.length - s.begin) + STEP - 1) / STEP : 0;
  return s;
}

// An item is a KV head of a sequence (and of a chunk of its queries). Every block takes `share` places of the line, which
// has a place for every step. Where whole blocks for every item come out nearly as even, items are padded to such: a block
// that goes on to another item waits for its queries and pages, and all others wait for that block.
struct Line {
  i32 steps;  // in all
  int share;
  bool padded;
  DEVICE_MEMBER int places(int steps) const { return padded ? (steps + share - 1) / share * share : steps; }
};

constexpr int CHANGE_OF_ITEM = WARPS + WARPS / 4;  // what it costs, in steps of a block

DEVICE Line cut(i32 steps, i32 items, i32 longest, int blocks) {
  const int even = greatest(1, (steps + blocks - 1) / blocks);
  if (items == 0 || items > blocks) return {steps, even, false};
  const int blocks_of_item = blocks / items, own = (longest + blocks_of_item - 1) / blocks_of_item;
  return own <= even + CHANGE_OF_ITEM ? Line{steps, own, true} : Line{steps, even, false};
}

struct Sums {
  i32 steps, items, longest;  // of all heads and chunks: steps, items that have some, the most steps of one
};

// Of the sequences of a warp's lanes; every lane gets them.
DEVICE Sums add_up(Sums sums) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    sums.steps += shuffle_xor(sums.steps, d), sums.items += shuffle_xor(sums.items, d);
    sums.longest = greatest(sums.longest, shuffle_xor(sums.longest, d));
  }
  return sums;
}

DEVICE Sums with(Sums sums, const Sequence& s, int heads) {
  const i32 items = s.steps ? s.chunks * heads : 0;
  return {sums.steps + items * s.steps, sums.items + items, greatest(sums.longest, s.steps)};
}

struct Place {
  Line line;
  i32 places, items;  // of the sequences before one
};

// The line, and where sequence b begins on it.
DEVICE Place place_of(const Args& args, int b, int blocks, int lane) {
  Sums sums = {0, 0, 0};
  i32 places = 0, items = 0;
  for (int i = lane; i < args.sequences; i += 32) {
    const Sequence s = sequence_at(args, i);
    sums = with(sums, s, args.heads);
    if (i < b) places += s.chunks * args.heads * s.steps, items += s.chunks * args.heads;
  }
  sums = add_up(sums);
  const Line line = cut(sums.steps, sums.items, sums.longest, blocks);
  if (line.padded) {
    places = 0;
    for (int i = lane; i < b; i += 32) {
      const Sequence s = sequence_at(args, i);
      places += s.chunks * args.heads * line.places(s.steps);
    }
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) places += shuffle_xor(places, d), items += shuffle_xor(items, d);
  return {line, places, items};
}

// The sequence of a row of queries: mostly every sequence has one.
DEVICE int sequence_of(const Args& args, int row) {
  int b = least(row, args.sequences - 1);
  if (load_int(args.starts + b) <= row && row < load_int(args.starts + b + 1)) return b;
  b = 0;
  for (int high = args.sequences; high - b > 1;) {
    const int middle = (b + high) / 2;
    if (load_int(args.starts + middle) <= row) b = middle; else high = middle;
  }
  return b;
}

// A run of steps of one (sequence, chunk of queries, head).
struct Piece {
  int b, chunk, head;
  Sequence s;
  int item;         // number of the (sequence, chunk, head)
  int first, last;  // steps
};

// The first piece of a block, and how many steps it gets in all, which may be none. 32 sequences at a time.
DEVICE Piece first_piece(const Args& args, int lane, int& left) {
  const bool few = args.sequences <= 32;  // a single look at them is enough
  Sequence s = {};
  if (lane < args.sequences) s = sequence_at(args, lane);
  Line line;
  if (few) {
    const Sums sums = add_up(with({0, 0, 0}, s, args.heads));
    line = cut(sums.steps, sums.items, sums.longest, block_count());
  } else line = place_of(args, 0, block_count(), lane).line;
  const i32 from = block_index() * line.share;
  i32 places = 0, items = 0;
  Piece piece = {};
  left = 0;
  while (true) {
    const i32 places_of_item = line.places(s.steps);
    i32 numbers = s.chunks * args.heads, ends = numbers * places_of_item;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const i32 more = shuffle(ends, (lane - d) & 31), more_items = shuffle(numbers, (lane - d) & 31);
      if (lane >= d) ends += more, numbers += more_items;
    }
    const int over = count_lanes(places + ends <= from);  // how many of them end before the piece begins
    const i32 places_over = shuffle(ends, (over - 1) & 31), items_over = shuffle(numbers, (over - 1) & 31);
    if (over) places += places_over, items += items_over;
    if (over < 32) {
      piece.b += over;
      piece.s = {shuffle(s.start, over), shuffle(s.queries, over), shuffle(s.length, over),
                 WINDOW ? shuffle(s.begin, over) : 0, shuffle(s.steps, over), shuffle(s.chunks, over)};
      const int one = shuffle(places_of_item, over), within = (from - places) / one;
      piece.chunk = within / args.heads;
      piece.head = within % args.heads;
      piece.item = items + within;
      piece.first = from - places - within * one;
      left = least(line.share, line.padded ? piece.s.steps - piece.first : line.steps - from);
      piece.last = least(piece.s.steps, piece.first + left);
      break;
    }
    piece.b += 32;
    if (piece.b >= args.sequences) break;
    s = {};
    if (piece.b + lane < args.sequences) s = sequence_at(args, piece.b + lane);
  }
  return piece;
}

// The one behind it. There is one.
DEVICE Piece piece_after(const Args& args, const Piece& piece, int most) {
  Piece next = piece;
  next.item++;
  if (++next.head == args.heads) {
    next.head = 0;
    if (++next.chunk == piece.s.chunks) {
      next.chunk = 0;
      for (next.s = sequence_at(args, ++next.b); next.s.chunks == 0 || next.s.steps == 0; next.s = sequence_at(args, ++next.b))
        next.item += next.s.chunks * args.heads;
    }
  }
  next.first = 0;
  next.last = least(next.s.steps, most);
  return next;
}
