// Attention of few queries a sequence on packed pages: `attend` reads pages and leaves partial results, `merge` puts them
// together. The warps of a block take the steps of its ranges (schedule.cuh) in turn; each has its own ring of
// shared memory, filled ahead by asynchronous copies, and its own running softmax.
//
// Up to 4 columns (one narrow group): a query (rotated, scaled to 15 bits) is multiplied as two signed bytes with the
// bytes of the keys' levels, a probability (times its value's scale, 16 bits relative to the largest of the step) as two
// unsigned bytes with the bytes of the values' levels: integer tensor cores, exact sums, no conversion of levels. The
// bytes of a value word alternate between two dimensions, g and g + 8; they are regrouped (V_REGROUPED), or used as they
// are, once with probabilities in the even bytes and once in the odd ones. Of 1 bit no bytes of levels are made: single bits are
// operands. Formats without byte levels use halves in the same way.
//
// More columns (wide groups of 8): integer products become dear, and what is done for every score counts more than what
// is done for every level. Everything is in halves, and the output stays in the products' accumulators.
#include "decode/combine.cuh"
#include "decode/loader.cuh"
#include "decode/merge.cuh"
#include "decode/scores.cuh"
#include "decode/values.cuh"

template <int BITS, int ENTRIES, bool IN_PAIRS, bool APART_> DEVICE u32 level_entry(const float* levels, int i) {
  constexpr int FIRST = BITS == 5 ? 16 : 0, CODES = BITS < 4 ? 1 << BITS : 16;  // of what a nibble counts
  u32 entry = f32_to_f16(levels[IN_PAIRS ? FIRST + i % CODES : i % (1 << BITS)]);
  if (APART_ && i >= ENTRIES / 2) entry <<= 16;
  if (IN_PAIRS) entry |= f32_to_f16(levels[FIRST + i / 16 % CODES]) << 16;
  return entry;
}

// Every entry is written for all lanes, 16 bytes at a time, by threads that start at different lanes.
template <int BITS, int ENTRIES, bool IN_PAIRS, bool APART_> DEVICE void fill_levels(u8* table, const float* levels) {
  for (int i = thread_index(); i < ENTRIES; i += 32 * WARPS) {
    const u32 entry = level_entry<BITS, ENTRIES, IN_PAIRS, APART_>(levels, i);
#pragma unroll
    for (int k = 0; k < 8; k++) *(Words4*)(table + 128 * i + 16 * ((k + i) & 7)) = {entry, entry, entry, entry};
  }
}

// A permutation takes one operand of the kind that all lanes share; its table must not be one.
DEVICE LevelTables load_tables(const DecodeArgs& args, u8* shared, int lane) {
  u8* key_levels = shared;
  u8* value_levels = ONE_TABLE ? shared : shared + 128 * LEVEL_ENTRIES_K;
  fill_levels<K_BITS, LEVEL_ENTRIES_K, K_IN_PAIRS, K_APART>(key_levels, args.key_levels);
  if (!ONE_TABLE) fill_levels<V_BITS, LEVEL_ENTRIES_V, V_IN_PAIRS, V_APART>(value_levels, args.value_levels);
  const u32 signs = in_register(0x80808080u, lane);
  auto in_registers = [&](const Table& table, bool doubled) {
    return Table{in_register(doubled ? doubled_magnitudes(table.low) : table.low, lane),
                 in_register(doubled ? doubled_magnitudes(table.high) : table.high, lane), signs};
  };
  const Table key_table = in_registers(args.key_table, K_PERMUTED);
  const Table value_table = ONE_TABLE ? key_table : in_registers(args.value_table, V_PERMUTED);
  return {key_table, value_table, {shared_address(key_levels) + 4 * lane},
          {shared_address(value_levels) + 4 * lane}};
}

// What queries take the place of (QUERIES_IN_LEVELS): of each thread 16 bytes, copies of one entry.
struct DisplacedLevels {
  static constexpr int PLACES = QUERY_BYTES / 16, FIRST = LEVEL_BYTES / 16 - PLACES;
  u32 entry;
  DEVICE_MEMBER void load(const DecodeArgs& args) {
    static_assert(!QUERIES_IN_LEVELS || PLACES <= 32 * WARPS, "one place of a thread");
    const int i = (FIRST + min_i32(thread_index(), PLACES - 1)) / 8;
    const bool of_values = !ONE_TABLE && i >= LEVEL_ENTRIES_K;
    entry = of_values ? level_entry<V_BITS, LEVEL_ENTRIES_V, V_IN_PAIRS, V_APART>(args.value_levels, i - LEVEL_ENTRIES_K)
                      : level_entry<K_BITS, LEVEL_ENTRIES_K, K_IN_PAIRS, K_APART>(args.key_levels, i);
  }
  // When all warps have their queries.
  DEVICE_MEMBER void put_back(u8* shared) const {
    sync_threads();
    if (thread_index() < PLACES) *(Words4*)(shared + 16 * (FIRST + thread_index())) = {entry, entry, entry, entry};
    sync_threads();
  }
};

#if ROLES
#include "decode/roles.cuh"
#endif

#if CLUSTER > 1
#define IN_CLUSTERS CLUSTER_OF(CLUSTER)
#else
#define IN_CLUSTERS
#endif

KERNEL(32 * WARPS, MIN_BLOCKS) IN_CLUSTERS attend(GRID_CONSTANT DecodeArgs args) {
#if WGMMA
  SHARED_OPERANDS(shared);
#else
  SHARED_MEMORY(shared);
#endif
#if ROLES
  attend_in_roles(args, shared);
#else
  const int warp = WGMMA ? shfl(thread_index() / 32, 0) : thread_index() / 32, lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  if (POLLED) griddepcontrol_wait();  // `merge` starts later
  else pdl_wait();
  int left;  // steps of this block
  bool forgets = false;
  WorkRange range;
  if constexpr (CLUSTER > 1) {
    range = cluster_range(args);
    left = 0;  // there is no other range
    if (range.chunk >= range.s.chunks) return;
    ClusterInbox(shared).open();
  } else if constexpr (WHOLE) {
    range = whole_range(args);
    left = 0;
    if (range.s.chunks == 0) return;
  } else {
    WorkPartition partition;
    range = first_range(args, ThisBlock(), lane, partition, left);
    if (left <= 0) return;
    forgets = partition.padded;
  }
  const LevelTables tables = load_tables(args, shared, lane);

  // -- loading ahead: the queries travel at the same time as the first pages
  const Team team = {warp / TEAM, warp % TEAM};
  Loader loader;
  loader.init(shared, warp, lane);
  u8* const ring = loader.ring;
  int filled = 0;  // steps copied so far; slot = number % STAGES, if there are several
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto look_up = [&](const WorkRange& p, int step) {
    if (!ONE_RANGE || p.first < p.last) loader.look_up(min_i32(step, p.last - 1));  // some have nothing to do
  };
  auto begin_loading = [&](const WorkRange& p) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS) load_query(args, p, warp + i * WARPS, query[i], lane);
    loader.open(args, p);
    look_up(p, p.first + warp);
    if constexpr (STAGES == 1) {
      const int step = p.first + warp;
      loader.copy<true, false>(step, 0, step < p.last);
      loader.copy<false, true>(step, 0, step < p.last);
      look_up(p, step + WARPS);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      const int step = p.first + warp + i * WARPS;
      loader.copy(step, filled % STAGES, step < p.last);
      filled++;
      look_up(p, step + WARPS);
    }
  };
  begin_loading(range);
  DisplacedLevels displaced;
  if constexpr (QUERIES_IN_LEVELS) {
    displaced.load(args);
    sync_threads();  // queries are written to what is filled
  }
  bool starts_merge = POLLED;

  while (true) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS)
        prepare_query(args, range, warp + i * WARPS, query[i], shared, shared + QUERY_AT,
                      (float*)(OWN_SCRATCH ? shared + SCRATCH_AT + 4 * KD * warp : ring + (filled % STAGES) * SLOT), lane);
    if (BULK || WGMMA) fence_proxy_async();  // rings and operands were written to
    sync_threads();
    if constexpr (POLLED) {
      if (starts_merge && warp == WARPS - 1) start_merge(args, forgets, (i64)range.item + block_index(), lane);  // while the first pages travel
      starts_merge = false;
    }
    QueryOperands queries;
    queries.load(shared + QUERY_AT, lane);
    if constexpr (QUERIES_IN_LEVELS) displaced.put_back(shared);
    ColumnState columns;
    columns.load(args, range, shared, t);
    Accumulator acc;
    acc.clear();

    int taken = filled - (STAGES - 1);
    for (int step = range.first + warp; step - team.member < range.last; step += WARPS) {
      const bool real = TEAM == 1 || step < range.last;  // warps of a team take as many steps
      loader.wait(taken % STAGES, real);
      auto load_ahead = [&] {
        const int ahead = step + (STAGES - 1) * WARPS;
        loader.copy(ahead, filled % STAGES, ahead < range.last);
        filled++;
        loader.look_up(min_i32(ahead + WARPS, range.last - 1));
      };
      if (TEAM == 1 && STAGES > 1) load_ahead();
      const int next_step = step + WARPS;  // with one slot
      u8* slot = ring + (taken % STAGES) * SLOT;
      const int token0 = real || !WGMMA ? range.s.begin + step * STEP : NO_TOKEN;
      const bool clear = token0 + STEP <= columns.clear_end && token0 >= columns.clear_begin;
      StepScores s;
      const TokenFields tokens = {};  // of pairs only
      Probabilities weights;
      if constexpr (WGMMA) {
        if (!real) {  // of no tokens the scales are zero
          for (int p = 0; p < PIECES; p++)
            for (int i = lane; i < FIELDS * FIELD_STRIDE / 4; i += 32) *(u32*)(slot + p * PIECE + FIELDS_AT + 4 * i) = 0;
          sync_warp();
        }
        u8* operands = shared + TEAM_WEIGHTS_AT + (2 * team.number + (taken & 1)) * NT * OPERAND_BYTES;
        auto score = [&] {
          multiply_keys(slot, shared, queries, tables, lane, s);
          scale_scores(args, slot, columns, g, s);
          apply_mask(slot, shared, token0, clear, lane, s, acc.largest_fields);
        };
        score();
        Weighing weighing;
        const bool moves = publish_to_warpgroup<false>(s, slot, columns, tokens, operands, team, lane, acc, weighing);
        fence_proxy_async();  // before products read it, and the copy engine writes to the slot again
        const bool again = team.any(moves);
        load_ahead();  // nobody reads the values of the step before any more
        if (again) {
          score();
          update_max(slot, columns, g, t, s, real, team, (float*)(shared + STATE_AT), nullptr, tokens, acc);
          publish_to_warpgroup<true>(s, slot, columns, tokens, operands, team, lane, acc, weighing);
          fence_proxy_async();
          team.sync();
        }
#pragma unroll
        for (int c = 0; c < C; c++) acc.row_sum[c] = weighing.sum[c], acc.shift[c] = weighing.shift[c];
        add_values_of_warpgroup(slot - team.member * STAGES * SLOT, operands, team, tables, lane, acc);
      } else {
        if (real) {
          multiply_keys(slot, shared, queries, tables, lane, s);
          scale_scores(args, slot, columns, g, s);
          if (STAGES == 1) loader.wait_for_values();
          apply_mask(slot, shared, token0, clear, lane, s, acc.largest_fields);
          if constexpr (STAGES == 1) {
            sync_warp();
            loader.copy<true, false>(next_step, 0, next_step < range.last);
          }
        }
        if constexpr (!WIDE && !V_BYTES) {
          float sum[C], shift[C];
          if (warp_any(weigh_in_halves<false>(slot, columns, g, s, acc, weights, sum, shift))) {
            update_max(slot, columns, g, t, s, real, team, nullptr, nullptr, tokens, acc);
            weigh_in_halves<true>(slot, columns, g, s, acc, weights, sum, shift);
          }
#pragma unroll
          for (int c = 0; c < C; c++) acc.row_sum[c] = sum[c], acc.shift[c] = shift[c];
        } else if constexpr (!WIDE) {
          StepScores p;
          if (raised_exponents(columns, s, acc, p)) {
            update_max(slot, columns, g, t, s, real, team, nullptr, nullptr, tokens, acc);
            raised_exponents(columns, s, acc, p);
          }
          raised_exponentials(slot, g, p, acc);
          pack_probabilities(p, weights);
        } else {
          update_max(slot, columns, g, t, s, real, team, (float*)(shared + STATE_AT), nullptr, tokens, acc);
          if (TEAM > 1) load_ahead();  // nobody reads the values of the step before any more
          if (real) {
            exponentials(slot, columns, g, s, acc);
            pack_probabilities(s, weights);
          }
        }
        if constexpr (TEAM == 1) {
          add_values(slot, weights, tables, lane, acc);
          sync_warp();  // before this slot is filled again
          if constexpr (STAGES == 1) {
            loader.copy<false, true>(next_step, 0, next_step < range.last);
            loader.look_up(min_i32(next_step + WARPS, range.last - 1));
          }
        } else {
          if (real) publish(weights, slot, lane);
          if (BULK) fence_proxy_async();  // before the copy engine writes there again
          team.sync();
          add_values_of_team(slot - team.member * STAGES * SLOT, min_i32(TEAM, range.last - (step - team.member)), team, tables, lane,
                             acc);
        }
      }
      taken++;
    }
    loader.wait_for_all();
    team.sync();  // before rings are filled again

    // -- what comes next is loaded while this range is finished; slot 0 is kept free for its results
    left -= range.last - range.first + ITEM_COST;  // with what the next item takes
    WorkRange next = range;
    filled = 1;
    if (!ONE_RANGE && left > 0) {
      next = next_range(args, range, left);
      if (STAGES > 1) begin_loading(next);
    }
    combine_warps(args, range, columns, acc, team, shared, ring, warp, lane);
    if constexpr (CLUSTER > 1) return combine_cluster(args, range, shared, warp, lane);
    if (left <= 0) return;
    if (STAGES == 1) {
      if (BULK) fence_proxy_async(), sync_warp();  // results were where pages go
      begin_loading(next);
    }
    range = next;
  }
#endif
}
HOST_TESTABLE_CLUSTER(attend, DecodeArgs, CLUSTER)
