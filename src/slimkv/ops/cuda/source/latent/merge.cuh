// A kernel that merges the partial results of work tiles that several thread blocks share, and writes the output.
//
// A thread block merges MERGE_DIMS dimensions of some rows of one work tile. args.merge_warps of its warps (a power of
// two, as many as fit the device) share the partial results of a row. Merging a row is bound by latency, not by
// bandwidth, so a thread block has several rows, and several warps share rows with many partial results.
//
// Defines: MERGE_DIMS, MIN_MERGE_WARPS and MAX_MERGE_WARPS (of a thread block).
#pragma once
#include "latent/results.cuh"

constexpr int MERGE_AHEAD = 4;  // partial results that a warp prefetches
static_assert(ROWS % MIN_MERGE_WARPS == 0, "rows of a thread block belong to one work tile");

// A lane's columns of a partial result, in fragment order: four of each 128.
struct PartialRow {
  static constexpr int WORDS = MERGE_DIMS / 128;
  Words2 words[WORDS];

  DEVICE_MEMBER void load(const u16* row, int lane, int dims) {
    UNROLL_FOR (int w = 0; w < WORDS; w++)
      words[w] = 128 * w + 4 * lane < dims ? *(const Words2*)(row + 128 * w + 4 * lane) : Words2{0, 0};
  }
  DEVICE_MEMBER void add_to(float (&x)[4 * WORDS], float by) const {
    UNROLL_FOR (int w = 0; w < WORDS; w++) {
      x[4 * w] += f16_to_f32(words[w].x & 0xFFFF) * by, x[4 * w + 1] += f16_to_f32(words[w].x >> 16) * by;
      x[4 * w + 2] += f16_to_f32(words[w].y & 0xFFFF) * by, x[4 * w + 3] += f16_to_f32(words[w].y >> 16) * by;
    }
  }
};

// The factor that rescales a partial result to maximum `highest`. A result without a maximum is empty or NaN.
DEVICE float factor_of(u32 row_max, float highest) {
  return as_float(row_max) == MINUS_INFINITY ? 1.0f : exp2_approx(as_float(row_max) - highest);
}

// The maximum and sum of a row; `states` receives those of all partial results. All warps of a row write equal states.
struct RowState { float highest, row_sum; };
DEVICE RowState merge_states(const float* from, Words2* states, int count, int lane) {
  RowState row = {MINUS_INFINITY, 0.0f};
#pragma unroll 4
  for (int i = lane; i < count; i += 32) {
    const Words2 state = *(const Words2*)(from + 2 * i * ROWS);
    states[i] = state, row.highest = max_f32(row.highest, as_float(state.x));
  }
  UNROLL_FOR (int d = 16; d; d >>= 1) row.highest = max_f32(row.highest, shfl_xor(row.highest, d));
  sync_warp();
  for (int i = lane; i < count; i += 32) row.row_sum += as_float(states[i].y) * factor_of(states[i].x, row.highest);
  UNROLL_FOR (int d = 16; d; d >>= 1) row.row_sum += shfl_xor(row.row_sum, d);
  return row;
}

KERNEL(32 * MAX_MERGE_WARPS, 1) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(scratch);
  const int warp = thread_index() / 32, lane = thread_index() & 31, warps_of_row = args.merge_warps;
  const int warps = max_i32(warps_of_row, MIN_MERGE_WARPS), rows = warps / warps_of_row;
  float* const sums = (float*)scratch;  // [warp, dimension]
  float* const factors = sums + warps * MERGE_DIMS;  // [warp]: the normaliser of its row
  const int number = block_index() * rows * args.merge_rounds / ROWS, turn = warp % warps_of_row;
  Words2* const states = (Words2*)(factors + warps) + warp / warps_of_row * args.blocks;
  const int dim = MERGE_DIMS * block_index_y(), dims = min_i32(LD - dim, MERGE_DIMS);
  pdl_wait();
  const TileParts parts = ((const TileParts*)args.tiles)[number];  // undefined for work tiles without queries
  const bool by_block = merges_by_block(args);
  if (args.direct && parts.count < 2) return;  // the output of a whole work tile is complete
  const WorkTile tile(args, by_block ? parts.sequence : number / args.row_tiles,
      by_block ? parts.tile : number % args.row_tiles);

  for (int round = 0; round < args.merge_rounds; round++) {
    const int first_row = (block_index() * args.merge_rounds + round) * rows % ROWS,
              n = first_row + warp / warps_of_row;
    const int count = n < tile.count ? parts.count : 0;
    const i64 first = (i64)parts.first * ROWS + n;
    const u16* next = args.parts + (first + turn * ROWS) * LD + dim;
    int left = count - turn;
    PartialRow ahead[MERGE_AHEAD];  // loads in flight while maxima are compared
    auto load = [&](PartialRow& row) {
      row.load(next, lane, left > 0 ? dims : 0);
      next += warps_of_row * ROWS * LD, left -= warps_of_row;
    };
    UNROLL_FOR (int j = 0; j < MERGE_AHEAD; j++) load(ahead[j]);
    const RowState row = merge_states(args.states + 2 * first, states, count, lane);
    float x[4 * PartialRow::WORDS] = {};
    for (int i = turn; i < count; i += MERGE_AHEAD * warps_of_row) {
      UNROLL_FOR (int j = 0; j < MERGE_AHEAD; j++) {
        const int own = i + j * warps_of_row;
        if (own < count) ahead[j].add_to(x, factor_of(states[own].x, row.highest));
        load(ahead[j]);
      }
    }

    UNROLL_FOR (int w = 0; w < PartialRow::WORDS; w++)
      UNROLL_FOR (int i = 0; i < 4; i++)
        sums[MERGE_DIMS * warp + 128 * w + place_of(lane / 4 * 16 + 2 * (lane & 3) + i % 2 + i / 2 * 8)] = x[4 * w + i];
    if (lane == 0) factors[warp] = normaliser(row.row_sum);
    if (n < tile.count && turn == 0 && lane == 0 && dim == 0) store_lse(args, tile, n, row.highest, row.row_sum);
    sync_threads();
    for (int i = thread_index(); i < rows * MERGE_DIMS; i += 32 * warps) {
      const int slot = i / MERGE_DIMS, own = i % MERGE_DIMS, m = first_row + slot;
      if (m >= tile.count || own >= dims) continue;
      float y = 0.0f;
      for (int w = slot * warps_of_row; w < (slot + 1) * warps_of_row; w++) y += sums[MERGE_DIMS * w + own];
      store_output(args, output_row(args, tile, m) + dim + own, y * factors[slot * warps_of_row]);
    }
    sync_threads();  // before the next rows' sums
  }
}
HOST_TESTABLE(merge, LatentArgs)
