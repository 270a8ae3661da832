// Work of the decode kernels: a work tile is a KV head and a chunk of queries of one sequence. A step is STEP tokens,
// and each KV block of the schedule is one step.
//
// SPLITS: a KV block of the schedule is a split of args.split_steps steps instead, counted from the sequence's first
// token. Its partial result is the same in every call, whatever else is in the batch and whichever thread block
// computes it (docs/design/kernels.md). A warp takes every WARPS-th step of a split, counted from the split's first
// step; steps before a window are skipped.
#pragma once
#include "decode/shape.cuh"

// The query of a column within its chunk, or the KV head of a query head; for up to 2^11 of either.
DEVICE int by_group(const DecodeArgs& args, int column) { return column * args.group_inverse >> 16; }
DEVICE int in_group(const DecodeArgs& args, int column) { return column - by_group(args, column) * args.group_size; }

struct Sequence {
  int start, queries, length;
  int begin;  // token of step 0, a multiple of STEP
  int steps;  // from `begin` to the last token
  int skipped;  // SPLITS: steps that no query sees
  int tiles;  // work tiles: chunks of queries times KV heads
  int kv_blocks;  // per work tile
};
DEVICE Sequence sequence_at(const DecodeArgs& args, int b) {
  Sequence s;
  s.start = ldg_i32(args.cu_seqlens_q + b);
  s.queries = ldg_i32(args.cu_seqlens_q + b + 1) - s.start;
  s.length = ldg_i32(args.seq_lens + b);
  s.begin = 0;
  s.skipped = 0;
  const int first = WINDOW ? max_i32(0, s.length - s.queries - args.sliding_window + 1) / STEP : 0;
  if (SPLITS) s.skipped = first;
  else s.begin = first * STEP;
  const int per_chunk = args.queries_of_chunk;
  const bool ours = s.queries > 0 && s.queries <= args.max_decode_queries;
  s.tiles = ours ? small_quotient(s.queries + per_chunk - 1, per_chunk) * args.num_kv_heads : 0;
  s.steps = ours ? (max_i32(0, s.length - s.begin) + STEP - 1) / STEP : 0;
  s.kv_blocks = s.steps;
  if (SPLITS && ours)
    s.kv_blocks = quotient(s.steps + args.split_steps - 1, args.split_steps) - quotient(s.skipped, args.split_steps);
  return s;
}
DEVICE Sequence from_lane(const Sequence& s, int lane) {
  return {shfl(s.start, lane), shfl(s.queries, lane), shfl(s.length, lane), WINDOW ? shfl(s.begin, lane) : 0,
      SPLITS ? shfl(s.steps, lane) : 0, SPLITS && WINDOW ? shfl(s.skipped, lane) : 0, shfl(s.tiles, lane),
      shfl(s.kv_blocks, lane)};
}

// The cost of another work tile, in KV blocks: of switching to it, and that plus idle warps in its last KV blocks.
constexpr int TILE_SWITCH_COST = VERIFY ? 2 * RINGS : WARPS + WARPS / 4, TILE_COST = TILE_SWITCH_COST + RINGS / 2;
constexpr int MIN_SHARE = VERIFY ? 1 : 4;  // with fewer KV blocks, merging costs more than splitting saves
constexpr bool PAD_TILES = true;
#include "common/schedule.cuh"
DEVICE WorkCosts costs_of(const DecodeArgs&) {
  return SPLITS ? WorkCosts{0, 0, 1} : WorkCosts{TILE_COST, TILE_SWITCH_COST, MIN_SHARE};
}

// A range of KV blocks of a work tile. One result covers steps `from` to `to`: all steps or, with SPLITS, one split.
struct DecodeRange : WorkRange {
  int chunk, head;  // chunk of queries; KV head
  int base, from, to;  // base: the step from which warps count

  DEVICE_MEMBER DecodeRange(const DecodeArgs& args, const WorkRange& range) : WorkRange(range) {
    chunk = small_quotient(tile, args.num_kv_heads);
    head = tile - chunk * args.num_kv_heads;
    set_steps(args);
  }
  DEVICE_MEMBER void set_steps(const DecodeArgs& args) {
    base = from = first, to = last;
    if (!SPLITS) return;
    base = (quotient(s.skipped, args.split_steps) + first) * args.split_steps;
    from = max_i32(base, s.skipped), to = last > first ? min_i32(s.steps, base + args.split_steps) : from;
  }
  DEVICE_MEMBER int first_step(int warp) const {
    const int before = from - base - warp;  // steps of the split that the warp skips
    return base + warp + (SPLITS && WINDOW && before > 0 ? (before + WARPS - 1) / WARPS * WARPS : 0);
  }
  // Advances to the next split of the same work tile; returns whether there is one.
  DEVICE_MEMBER bool next_split(const DecodeArgs& args) {
    if (!SPLITS || first + 1 >= last) return false;
    first++;
    set_steps(args);
    return true;
  }
  // The index of the partial result.
  DEVICE_MEMBER int part(const DecodeArgs& args) const {
    return SPLITS ? number * args.max_splits + first : part_of(*this);
  }
};

// The pages of a range's sequence and KV head.
struct RangePages {
  const u8* pages;
  const i32* table;
  i64 page_stride;
  int begin_tile, last_page;

  DEVICE_MEMBER void open(const DecodeArgs& args, const DecodeRange& range) {
    page_stride = args.page_stride;
    pages = args.pages + (i64)range.head * args.page_head_stride;
    table = args.block_table + (i64)range.b * args.table_stride;
    begin_tile = range.s.begin / 16, last_page = (range.s.length - 1) / BLOCK_SIZE;
  }
  // The id of page `piece` of a step, in the block table; the last one if there are fewer pages.
  DEVICE_MEMBER const i32* id_at(int step, int piece) const {
    return table + min_i32((begin_tile + NT * step) / (BLOCK_SIZE / 16) + piece, last_page);
  }
};

// The partial results of a work tile.
DEVICE Partials decode_partials(const DecodeArgs& args, int b, int tile, int lane) {
  if (!SPLITS) return partials_of(args, b, tile, lane);
  return {(tiles_before(args, b, lane) + tile) * args.max_splits, sequence_at(args, b).kv_blocks};
}

// The only range of a thread block, if each KV head of every sequence has a block of its own (args.blocks == 0).
DEVICE WorkRange whole_tile(const DecodeArgs& args) {
  WorkRange range = {};
  range.number = block_index();
  range.b = quotient(range.number, args.num_kv_heads);
  range.tile = range.number - range.b * args.num_kv_heads;
  range.s = sequence_at(args, range.b);
  range.last = range.s.kv_blocks;
  return range;
}

// The sequence of a row of queries. In most batches every sequence has one query, so row b is tried first.
DEVICE int sequence_of(const DecodeArgs& args, int row) {
  int b = min_i32(row, args.num_seqs - 1);
  if (ldg_i32(args.cu_seqlens_q + b) <= row && row < ldg_i32(args.cu_seqlens_q + b + 1)) return b;
  b = 0;
  for (int high = args.num_seqs; high - b > 1;) {
    const int middle = (b + high) / 2;
    if (ldg_i32(args.cu_seqlens_q + middle) <= row) b = middle;
    else high = middle;
  }
  return b;
}
