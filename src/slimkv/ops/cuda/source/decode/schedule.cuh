// Work of the decode kernels: a work tile is a KV head of a sequence and of a chunk of its queries. A KV block is STEP tokens.
#pragma once
#include "decode/shape.cuh"

// Of a column of a chunk its query, of a query head its KV head: below 2^11 of either.
DEVICE int by_group(const DecodeArgs& args, int column) { return column * args.group_inverse >> 16; }
DEVICE int in_group(const DecodeArgs& args, int column) { return column - by_group(args, column) * args.group_size; }

struct Sequence {
  int start, queries, length;
  int begin;      // the first token that is looked at, a multiple of STEP
  int tiles;      // work tiles: chunks of queries that are attended together, times KV heads
  int kv_blocks;  // of each of them
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
  s.tiles = ours ? small_quotient(s.queries + per_chunk - 1, per_chunk) * args.num_kv_heads : 0;
  s.kv_blocks = ours ? (max_i32(0, s.length - s.begin) + STEP - 1) / STEP : 0;
  return s;
}
DEVICE Sequence from_lane(const Sequence& s, int lane) {
  return {shfl(s.start, lane), shfl(s.queries, lane), shfl(s.length, lane), WINDOW ? shfl(s.begin, lane) : 0, shfl(s.tiles, lane),
          shfl(s.kv_blocks, lane)};
}

// What it costs to go on to another work tile, in KV blocks, and with the idle warps of its last ones.
constexpr int TILE_SWITCH_COST = VERIFY ? 2 * RINGS : WARPS + WARPS / 4, TILE_COST = TILE_SWITCH_COST + RINGS / 2;
constexpr int MIN_SHARE = VERIFY ? 1 : 4;  // fewer KV blocks leave more to merge than they save
constexpr bool PAD_TILES = true;
#include "common/schedule.cuh"

// KV blocks of a work tile, and whose they are.
struct DecodeRange : WorkRange {
  int chunk, head;  // of queries; KV head
  DEVICE_MEMBER DecodeRange(const DecodeArgs& args, const WorkRange& range) : WorkRange(range) {
    chunk = small_quotient(tile, args.num_kv_heads);
    head = tile - chunk * args.num_kv_heads;
  }
};

// The only range of a block where every sequence has a block for each KV head.
DEVICE WorkRange whole_tile(const DecodeArgs& args) {
  WorkRange range = {};
  range.number = block_index();
  range.b = quotient(range.number, args.num_kv_heads);
  range.tile = range.number - range.b * args.num_kv_heads;
  range.s = sequence_at(args, range.b);
  range.last = range.s.kv_blocks;
  return range;
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
