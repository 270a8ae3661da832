// The compile-time parameters of attend.cu, its shared memory layout, and the work tile of a thread block.
// Defines (ops/attention/cuda/prefill_defines.py):
// D, STEP (tokens per tile), EIGHT_BIT, INTEGERS (tiles.cuh), PROMOTE (with EIGHT_BIT), Q_TYPE, OUT_TYPE (types.cuh),
// K_ROTATED, V_ROTATED, ROTATION_CORE (rotation.cuh);
// FUSED (producer warpgroups unpack pages into shared memory), AHEAD (blocks unpack the tiles of later blocks); both
// need the page layout (BLOCK_SIZE, K_KIND, ...), K_LEVELS, V_LEVELS (LUT entries), ONE_TABLE (one LUT for both);
// CONSUMERS, PRODUCERS (warpgroups), ROW_BLOCKS (of 64 rows, per consumer), PRODUCER_REGISTERS, STAGES;
// BY_ROW (a row's result depends only on its own sequence, bit for bit);
// WINDOW, SOFTCAP, SCORE_SHIFT (with SOFTCAP: scores are shifted before the cap);
// HANDS_ON (several passes are possible, with the softmax state in device memory between them).
// Shared memory, aligned to 1,024 bytes: queries of all row blocks, QUERY_BYTES each | KEYS_AT: ring of tiles,
// KEYS_BYTES each | VALUES_AT: the same for values | TOTALS_AT: output totals (EIGHT_BIT) | BARRIERS_AT | SCALES_AT:
// ring of the tiles' scales | LEVELS_AT: LUTs | PACKED_AT: FUSED, pages in flight, PACKED_STAGES of PACKED_BYTES.
#pragma once
#include "common/numbers.cuh"
#include "prefill/args.cuh"

// The maximum over the four lanes of a row (a quad).
DEVICE float quad_max(float x) {
  x = max_f32(x, shfl_xor(x, 1));
  return max_f32(x, shfl_xor(x, 2));
}

constexpr int GROUP_ROWS = 64, ROWS = CONSUMERS * ROW_BLOCKS * GROUP_ROWS, THREADS = 128 * (CONSUMERS + PRODUCERS),
              N = STEP / 2, OWN = PLACES / 4;
// In powers of two. A warp updates running maxima if a probability of any row is 2^8 or more. BY_ROW: rows below 2^8
// must not be updated then, however their scores round.
constexpr float RESCALE_THRESHOLD = BY_ROW ? 8.5f : 8.0f;
// The registers of a consumer thread: its initial ones and its share of those that producers release.
constexpr int WARPGROUPS = PRODUCERS + CONSUMERS;
constexpr int CONSUMER_REGISTERS =
    (WARPGROUPS * (512 / WARPGROUPS / 8 * 8) - PRODUCERS * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

// A compile-time constant as an argument.
template <int VALUE> struct Constant { static constexpr int value = VALUE; };

// A slot in a ring of tiles, and the parity of the phase in which it is filled.
struct Place {
  int slot;
  u32 parity;

  DEVICE_MEMBER Place next() const {
    const int after = slot + 1 == STAGES ? 0 : slot + 1;
    return {after, after ? parity : parity ^ 1};
  }
};

// The rings of tiles in shared memory, their barriers, and the output totals (EIGHT_BIT).
struct Rings {
  u8* keys;
  u8* values;
  u64* keys_full;
  u64* keys_empty;
  u64* values_full;
  u64* values_empty;
  u8* totals;
  const TileScale* scales;  // loaded with fp16 keys, or with byte values
};

// The visible tokens of a lane's two rows.
struct Visible {
  int begin[2], end[2];
  // Whether a lane's score i, counted from token `first`, is masked.
  DEVICE_MEMBER bool masks(int first, int i, int t) const {
    const int token = first + 8 * (i / 4) + 2 * t + i % 2, r = i / 2 % 2;
    return token >= end[r] || (WINDOW && token < begin[r]);
  }
};

#if EIGHT_BIT
constexpr int OUTPUTS = D / 2, TOKENS = STEP / 2, SCORES = TOKENS / 2, WORDS = SCORES / 4;  // per half tile and lane

// Scales of four tokens of a tile.
struct TokenScales {
  float key[4], value[4];
  DEVICE_MEMBER TokenScales(const u8* numbers, int at) {
    const Words4 a = *(const Words4*)(numbers + token_number_at(KEY_SCALE, at));
    const Words4 b = *(const Words4*)(numbers + token_number_at(VALUE_SCALE, at));
    key[0] = as_float(a.x), key[1] = as_float(a.y), key[2] = as_float(a.z), key[3] = as_float(a.w);
    value[0] = as_float(b.x), value[1] = as_float(b.y), value[2] = as_float(b.z), value[3] = as_float(b.w);
  }
};

#endif

// The running softmax of a lane's rows g and g + 8.
struct RowState {
  float factor[2];  // turns products into scores
  float shift[2];  // SCORE_SHIFT: added to scores, times cap_factor
  float row_max[2];  // the running maximum that exponents are relative to
  float row_sum[2];  // the sum over this lane's share of the row, relative to row_max

  DEVICE_MEMBER float output_factor() const { return 1.0f; }  // from accumulators to sums of probabilities times values
  // SOFTCAP: the capped score of a product x in row r, in units of `unit`.
  DEVICE_MEMBER float capped(float x, int r, float unit, float softcap) const {
    const float by = factor[r] * unit * cap_factor(softcap);
    return soft_cap(SCORE_SHIFT ? fma_rn(x, by, shift[r]) : x * by, softcap);
  }
};

// The query and head of a row of a thread block; `valid`: they exist.
struct Row {
  int of_sequence;  // the query's index in its sequence
  i64 query;
  int head;
  bool valid;
};

DEVICE Row row_of(const PrefillArgs& args, const Work& w, int row_block, int row) {
  const int of_block = GROUP_ROWS * row_block + row, query = w.first + of_block / args.group_size;
  return {query, (i64)w.s.start + query, w.head * args.group_size + of_block % args.group_size,
      of_block < ROWS / args.group_size * args.group_size && query < w.s.queries};
}

#if FUSED
#include "prefill/split.cuh"
#else
// Finds the queries of a thread block; false if it has none in this pass.
DEVICE bool find_queries(const PrefillArgs& args, int lane, Work& w) {
  const int queries_of_block = ROWS / args.group_size;
  // The heads of a section share the L2 cache. Within a section, blocks that see the most tokens (causal) come first.
  const int per_section = args.section * args.query_blocks, section = block_index() / per_section;
  const int inside = block_index() - section * per_section;
  const int heads = min_i32(args.section, args.num_kv_heads - section * args.section);
  const int block = args.query_blocks - 1 - inside / heads;
  w.head = section * args.section + inside % heads;
  // The last sequence whose blocks begin at or before this one; the numbers of prefilled sequences up to it and in all.
  u32 begun = 0, prefilled = 0, prefilled_of_all = 0;
  PrefillSequence own = {0, 0, 0, 0};  // the last sequence read by the lane
#pragma unroll 2
  for (int i = lane; i < args.num_seqs; i += 32) {
    own = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, i);
    const bool begins = own.start / queries_of_block + i <= block, counts = own.queries > args.max_decode_queries;
    begun += begins, prefilled += begins && counts, prefilled_of_all += counts;
  }
  const int sequence = w.sequence = (int)warp_sum(begun) - 1;  // the same in all lanes
  if (args.num_seqs <= 32)
    w.s = {shfl(own.start, sequence), shfl(own.queries, sequence), shfl(own.length, sequence), 0};
  else w.s = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, sequence);
  w.first = (block - (w.s.start / queries_of_block + sequence)) * queries_of_block;
  if (w.first >= w.s.queries || w.s.queries <= args.max_decode_queries) return false;
  // Its tiles must be among those unpacked in this pass.
  w.s.rank = (int)warp_sum(prefilled) - 1 - args.first_rank;
  if (w.s.rank < 0 || w.s.rank >= args.ranks) return false;
  w.present = min_i32(args.ranks, (int)warp_sum(prefilled_of_all) - args.first_rank);
  return true;
}
#endif

DEVICE bool find_work(const PrefillArgs& args, int lane, Work& w) {
  const int queries_of_block = ROWS / args.group_size;
  if (!find_queries(args, lane, w)) return false;
  const int before = w.s.length - w.s.queries, last = min_i32(w.first + queries_of_block, w.s.queries);
  const int end = w.end = args.causal ? before + last : w.s.length;
  w.clear_end = args.causal ? before + w.first + 1 : w.s.length;
  w.clear_begin = WINDOW ? before + last - args.sliding_window : 0;
  const int begin_tile = WINDOW ? max_i32(0, before + w.first - args.sliding_window + 1) / STEP : 0;
  const int end_tile = end > 0 ? (end + STEP - 1) / STEP : 0;
  w.origin = origin_of(args, w.s);
  const int tiles = FUSED ? (end_tile_of(w) - w.origin + w.splits - 1) / w.splits : args.tiles,
            first_tile = w.origin + (FUSED ? w.split * tiles : args.first_tile);
  const int low = max_i32(begin_tile, first_tile), high = min_i32(end_tile, first_tile + tiles);
  w.tile = high - 1;
  w.count = max_i32(0, high - low);
  return true;
}

// How many query rows the sequence has from the block's first row on.
DEVICE int rows_of(const PrefillArgs& args, const Work& w) { return (w.s.queries - w.first) * args.group_size; }

// Whether all queries of the block see all tokens of a tile.
DEVICE bool is_clear(const Work& w, int tile) {
  return (tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin);
}

// The i-th tile of a thread block. The last tile comes second (if there are several), because its mask leaves few
// tokens to some rows, whose maximum predicts little. BY_ROW: from first to last, so that a row visits its tiles in the
// same order wherever blocks and passes end.
DEVICE int tile_at(const Work& w, int i) {
  return BY_ROW ? w.tile - w.count + 1 + i : w.tile - (i < 2 && w.count > 1 ? 1 - i : i);
}
