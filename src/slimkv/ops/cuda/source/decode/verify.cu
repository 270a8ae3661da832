// Attention of more than 16 query rows of a KV head on packed pages, on sm_90a (docs/design/kernels.md): pairs of warpgroups, of which one
// makes scores and probabilities and the other multiplies values with them. What one waits for is hidden behind what the other does, and
// neither holds the other's registers. A pair has a ring, and a step is NT tiles for all of it. Of more than 40 columns a warp has the
// scores of one tile at a time (TILE_BY_TILE).
#define VERIFY 1
#include "decode/merge.cuh"
#include "decode/verify_keys.cuh"
#include "decode/verify_values.cuh"

constexpr int KEY_REGISTERS = NG == 5 ? 144 : 136;  // of the 256 that a thread of each role have together

// Queries of a range that are in the lanes' registers, to operands with one unit. In between they are in shared memory, so that one piece of
// code does for all: it is met for the first time, and comes from far away.
template <int QUERIES>
DEVICE void prepare_queries(const DecodeArgs& args, const DecodeRange& range, const float (&query)[QUERIES][QN],
    u8* shared, int warp, int lane) {
  const float infinity = as_float(0x7F800000u);
  float* scratch = (float*)(shared + PROBABILITIES_AT) + warp * KD;
  constexpr bool STAGED = COLUMNS > 32 && 4 * KD * (WARPS + COLUMNS) <= RINGS_AT - PROBABILITIES_AT;
  float* const rotated = (float*)(shared + PROBABILITIES_AT) + WARPS * KD + warp * KD + lane;
  if (STAGED) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
#pragma unroll
        for (int j = 0; j < QN; j++)
          if (lane + 32 * j < KD) rotated[i * WARPS * KD + 32 * j] = query[i][j];
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      float* const place = rotated + (column - warp) * KD;
      float y[QN];
#pragma unroll
      for (int j = 0; j < QN; j++) y[j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      const float largest = rotate_query(args, y, scratch, lane);
#pragma unroll
      for (int j = 0; j < QN; j++)
        if (lane + 32 * j < KD) place[32 * j] = y[j];
      if (lane == 0) *column_at(shared, column) = {largest < infinity ? largest : 0.0f, largest, 0, 0};
    }
  }
  float y[QUERIES][QN], largest[QUERIES], all = 0;
  if (!STAGED)
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
#pragma unroll
      for (int j = 0; j < QN; j++) y[i][j] = query[i][j];
      largest[i] = rotate_query(args, y[i], scratch, lane);
      if (lane == 0 && warp + i * WARPS < COLUMNS)
        column_at(shared, warp + i * WARPS)->unit = largest[i] < infinity ? largest[i] : 0.0f;
    }
  sync_threads();
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 32)
    if (c + 32 <= COLUMNS || c + lane < COLUMNS) all = max_f32(all, column_at(shared, c + lane)->unit);
#pragma unroll
  for (int d = 16; d; d >>= 1) all = max_f32(all, shfl_xor(all, d));
  sync_threads();  // columns are written again
  if (STAGED) {
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      const float* const place = rotated + (column - warp) * KD;
      const bool finite = column_at(shared, column)->sum < infinity;
      sync_warp();
#pragma unroll
      for (int j = 0; j < QN; j++) y[0][j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      write_query(args, range, column, y[0], all, finite, shared, shared + QUERY_AT, lane);
    }
  } else
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
        write_query(args, range, warp + i * WARPS, y[i], all, largest[i] < infinity, shared, shared + QUERY_AT, lane);
}

// What both warpgroups of a pair do is one piece of code: instructions that are met for the first time come from far away.
KERNEL(32 * WARPS, BLOCKS_PER_SM) attend(GRID_CONSTANT DecodeArgs args) {
  SHARED_OPERANDS(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31, worker = warp % WORKERS;
  const bool has_values = warp >= WORKERS, loads = has_values && worker % TEAM == 0;
  pdl_wait();
  int left;
  WorkPartition partition;
  DecodeRange range(args, first_range(args, block_index(), args.blocks, lane, partition, left));
  if (left <= 0) return;
  const PairWarp own = {worker / TEAM, worker % TEAM};
  const PairMemory memory(shared, own.pair, lane, false);
  PairLoader loader;
  if (loads) loader.init(shared, memory, own.pair, lane);
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto begin_loading = [&](const DecodeRange& p) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++) load_query(args, p, warp + i * WARPS, query[i], lane);
    if (loads) loader.open(args, p, own.pair);
  };
  begin_loading(range);
  const LevelTables tables = load_tables(args, shared, lane);  // while pages travel
  u32 taken = 0;
  while (true) {
    prepare_queries(args, range, query, shared, warp, lane);
    fence_proxy_async();  // queries were written
    sync_threads();
    if (has_values) {
      setmaxnreg_dec<256 - KEY_REGISTERS>();
      PairOutput acc;
      acc.clear();
      attend_values(range, PairMemory(shared, own.pair, lane, true), own, tables, lane, loader, taken, acc);
      sync_threads();
#pragma unroll
      for (int first = 0; first < RINGS; first += RESULT_SUMS) {
        if (first) sync_team(1 + RINGS, 32 * WORKERS);
        if (RESULT_SUMS == RINGS || own.pair == first) leave_results(acc, own, shared, lane, first > 0);
      }
      setmaxnreg_inc<128>();
    } else {
      setmaxnreg_inc<KEY_REGISTERS>();
      RunningSoftmax acc;
      acc.clear();
      ColumnState columns;
      columns.load(args, range, shared, lane & 3);
      const PairMemory kept(shared, own.pair, lane, true);
      if constexpr (TILE_BY_TILE)
        attend_keys_by_tiles(args, range, shared, kept, own, columns, tables, lane, taken, acc);
      else attend_keys(args, range, shared, kept, own, columns, tables, lane, taken, acc);
      leave_states(columns, acc, (float*)(shared + STATE_AT), worker, lane);
      sync_threads();
      setmaxnreg_dec<128>();
    }
    left -= range.last - range.first + TILE_COST;  // with what the next work tile takes
    DecodeRange next = range;
    if (left > 0) {
      next = DecodeRange(args, next_range(args, range, left));
      begin_loading(next);
    }
    sync_threads();
    write_rows(args, range, shared, warp, lane);
    if (left <= 0) return;
    sync_threads();  // before results and states are written again
    range = next;
  }
}
HOST_TESTABLE(attend, DecodeArgs)
