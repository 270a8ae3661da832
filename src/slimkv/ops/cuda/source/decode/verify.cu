// Attention of more than 16 query rows per KV head on packed pages, for sm_90a (docs/design/kernels.md). Warpgroups are
// specialised in pairs: one computes scores and probabilities, the other multiplies values by them. Each hides the
// other's latency and needs registers only for its own role. A pair has one ring, whose steps are NT tiles for the
// whole pair. With more than 32 columns, a warp holds the scores of one tile at a time (TILE_BY_TILE).
#define VERIFY 1
#define WARPGROUPS 1
#include "decode/merge.cuh"
#include "decode/verify_keys.cuh"
#include "decode/verify_queries.cuh"
#include "decode/verify_values.cuh"

// Two threads, one of each role, share 256 registers. If either role has too few, the compiler serialises the wgmmas.
constexpr int LAUNCHED = 128,
              KEY_REGISTERS = OUT_SLICES * NG > 20 ? 112
    : VD > 128                                     ? 128
    : NG > 5                                       ? 144
                                                   : 136,
              VALUE_REGISTERS = 2 * LAUNCHED - KEY_REGISTERS;
template <int FROM, int TO> DEVICE void change_registers() {
  if constexpr (TO > FROM) setmaxnreg_inc<TO>();
  else if constexpr (TO < FROM) setmaxnreg_dec<TO>();
}

// Code that both roles need exists once, because fetching cold instructions is slow.
KERNEL(32 * WARPS, BLOCKS_PER_SM) attend(GRID_CONSTANT DecodeArgs args) {
  SHARED_OPERANDS(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31, worker = warp % WORKERS;
  const bool has_values = warp >= WORKERS, loads = has_values && worker % TEAM == 0;
  pdl_wait();
  int left;
  WorkPartition partition;
  DecodeRange range(args, first_range(args, block_index(), args.blocks, lane, partition, left));
  if (left <= 0) return;
  const TeamWarp own = {worker / TEAM, worker % TEAM};
  const PairMemory memory(shared, own.pair, lane, false);
  const PairLoader loader(shared, own, lane);
  if (loads) loader.init(memory);
  u32 taken = 0;
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto begin_loading = [&](const DecodeRange& p) {
    UNROLL_FOR (int i = 0; i < QUERIES; i++) load_query(args, p, warp + i * WARPS, query[i], lane);
    if (loads) loader.fill(memory, args, p, taken);
  };
  begin_loading(range);
  const LevelTables tables = load_tables(args, shared, lane);  // while pages are copied
  while (true) {
    prepare_queries(args, range, query, shared, warp, lane);
    fence_proxy_async();  // queries were written
    sync_threads();
    if (has_values) {
      change_registers<LAUNCHED, VALUE_REGISTERS>();
      TeamOutput acc;
      acc.clear();
      attend_values(args, range, PairMemory(shared, own.pair, lane, true), own, tables, lane, loader, taken, acc);
      sync_threads();
      UNROLL_FOR (int first = 0; first < RINGS; first += RESULT_SUMS) {
        if (first) sync_team(1 + RINGS, 32 * WORKERS);
        if (RESULT_SUMS == RINGS || own.pair == first) store_results(acc, own, shared, lane, first > 0);
      }
      change_registers<VALUE_REGISTERS, LAUNCHED>();
    } else {
      change_registers<LAUNCHED, KEY_REGISTERS>();
      RunningSoftmax acc;
      acc.clear();
      ColumnState columns;
      columns.load(args, range, shared, lane & 3);
      const PairMemory kept(shared, own.pair, lane, true);
      attend_keys(args, range, shared, kept, own, columns, tables, lane, taken, acc);
      store_states(columns, acc, (float*)(shared + STATE_AT), worker, lane);
      sync_threads();
      change_registers<KEY_REGISTERS, LAUNCHED>();
    }
    left -= range.last - range.first + TILE_COST;  // and the cost of the next work tile
    DecodeRange next = range;
    if (left > 0) {
      next = DecodeRange(args, next_range(args, range, left));
      begin_loading(next);
    }
    sync_threads();
    write_rows(args, range, shared, warp, lane);
    if (left <= 0) return;
    sync_threads();  // results and states have been read
    range = next;
  }
}
HOST_TESTABLE(attend, DecodeArgs)
