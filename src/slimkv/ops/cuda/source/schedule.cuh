// Who does what. Work is cut into steps of 16 NT tokens of one KV head. All steps of all sequences form one line, of which
// every block gets an equal piece, whatever the sequences' lengths: no block waits for another.
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

struct Sums {
  i32 steps, items, all_steps;  // before a sequence: steps of all heads and chunks, (chunk, head) pairs; steps in all
};

// Every lane of a warp gets them.
DEVICE Sums sums_before(const Args& args, int b, int lane) {
  Sums sums = {0, 0, 0};
  for (int i = lane; i < args.sequences; i += 32) {
    const Sequence s = sequence_at(args, i);
    const i32 n = s.chunks * args.heads;
    if (i < b) sums.steps += n * s.steps, sums.items += n;
    sums.all_steps += n * s.steps;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    sums.steps += shuffle_xor(sums.steps, d), sums.items += shuffle_xor(sums.items, d);
    sums.all_steps += shuffle_xor(sums.all_steps, d);
  }
  return sums;
}

DEVICE int steps_per_block(int all, int blocks) { return greatest(1, (all + blocks - 1) / blocks); }

// A run of steps of one (sequence, chunk of queries, head).
struct Piece {
  int b, chunk, head;
  Sequence s;
  int item;         // number of the (sequence, chunk, head)
  int first, last;  // steps
};

// The piece at place `from` of the line, of at most `most` steps: 32 sequences at a time.
DEVICE Piece piece_at(const Args& args, int from, int most, int lane) {
  i32 steps = 0, items = 0;
  int b = 0;
  for (;; b += 32) {
    Sequence s = {};
    if (b + lane < args.sequences) s = sequence_at(args, b + lane);
    i32 numbers = s.chunks * args.heads, ends = numbers * s.steps;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const i32 more = shuffle(ends, (lane - d) & 31), more_items = shuffle(numbers, (lane - d) & 31);
      if (lane >= d) ends += more, numbers += more_items;
    }
    i32 over = steps + ends <= from;  // how many of them end before the piece begins
#pragma unroll
    for (int d = 16; d; d >>= 1) over += shuffle_xor(over, d);
    const i32 steps_over = shuffle(ends, (over - 1) & 31), items_over = shuffle(numbers, (over - 1) & 31);
    if (over) steps += steps_over, items += items_over;
    if (over < 32) {
      b += over;
      break;
    }
  }
  Piece piece;
  piece.b = b;
  piece.s = sequence_at(args, b);
  const int within = (from - steps) / piece.s.steps;
  piece.chunk = within / args.heads;
  piece.head = within % args.heads;
  piece.item = items + within;
  piece.first = from - steps - within * piece.s.steps;
  piece.last = least(piece.s.steps, piece.first + most);
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
