// 16-bit mma.sync products, for devices without warpgroup products: scores and output of a warp's rows, and the loop
// over a block's tiles. All threads copy tiles, each a part: values while scores are multiplied, the next keys while
// the output is.
#pragma once
#include "common/hopper.cuh"
#include "prefill/softmax.cuh"

static_assert(KEYS_BYTES == VALUES_BYTES, "tiles are copied alike");

// A warp's queries are its own.
DEVICE void queries_are_written(int) { sync_warp(); }

// A thread's part of a tile.
DEVICE void copy_tile(u8* to, const u8* from) {
  UNROLL_FOR (int i = 0; i < KEYS_BYTES; i += 16 * THREADS)
    if (KEYS_BYTES % (16 * THREADS) == 0 || i + 16 * thread_index() < KEYS_BYTES)
      cp_async_16(to + i + 16 * thread_index(), from + i + 16 * thread_index());
}

// Operands: rows of 128 bytes in shared memory (tiles.cuh), four 8 x 8 matrices of 16-bit elements at a time. The first
// 16-byte unit of a lane's row; further units of the tile differ in other bits. For queries and values the second pair
// of matrices has other columns, for keys other rows.
DEVICE u32 by_columns(u32 tile, int row, int lane) {
  return tile + (row + lane % 16) * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}
DEVICE u32 by_rows(u32 tile, int lane) {
  return tile + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
}

// A warp's queries, 16 rows of each of BLOCKS blocks of rows: kept in registers (HELD_QUERIES), or loaded for each
// tile.
template <int BLOCKS> struct Queries {
  u32 address, held[HELD_QUERIES ? PLACES / 16 : 1][BLOCKS][4];

  DEVICE_MEMBER Queries(u32 operand, int lane) : address(by_columns(operand, thread_index() / 32 % 4 * 16, lane)) {
    UNROLL_FOR (int k = 0; HELD_QUERIES && k < PLACES / 16; k++)
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) load(k, b, held[k][b]);
  }
  DEVICE_MEMBER void load(int k, int b, u32 (&q)[4]) const {
    ldmatrix_x4(q, (address ^ k % 4 * 32) + b * CONSUMERS * QUERY_BYTES + k / 4 * 128 * GROUP_ROWS);
  }
};

// s = Q K^T, all tokens of the tile. A lane's fragment of keys serves all blocks.
template <int BLOCKS> DEVICE void multiply_scores(float (&s)[BLOCKS][N], const Queries<BLOCKS>& queries, u32 keys) {
  UNROLL_FOR (int k = 0; k < PLACES / 16; k++) {
    u32 q[BLOCKS][4];
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      if constexpr (HELD_QUERIES)
        UNROLL_FOR (int i = 0; i < 4; i++) q[b][i] = queries.held[k][b][i];
      else queries.load(k, b, q[b]);
    UNROLL_FOR (int n = 0; n < STEP / 16; n++) {
      u32 key[4];
      ldmatrix_x4(key, (keys ^ k % 4 * 32) + k / 4 * HALF_TILE + n * 2048);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        mma_f16(s[b] + 8 * n, q[b][0], q[b][1], q[b][2], q[b][3], key[0], key[1]);
        mma_f16(s[b] + 8 * n + 4, q[b][0], q[b][1], q[b][2], q[b][3], key[2], key[3]);
      }
    }
  }
}

// o += P V.
template <int BLOCKS> DEVICE void multiply_output(float (&o)[ROW_BLOCKS][OUTPUTS], const u32 (&p)[BLOCKS][N / 2],
    u32 values) {
  UNROLL_FOR (int k = 0; k < STEP / 16; k++)
    UNROLL_FOR (int n = 0; n < PLACES / 16; n++) {
      u32 value[4];
      ldmatrix_x4_trans(value, (values ^ n % 4 * 32) + n / 4 * HALF_TILE + k * 2048);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        mma_f16(o[b] + 8 * n, p[b][4 * k], p[b][4 * k + 1], p[b][4 * k + 2], p[b][4 * k + 3], value[0], value[1]);
        mma_f16(o[b] + 8 * n + 4, p[b][4 * k], p[b][4 * k + 1], p[b][4 * k + 2], p[b][4 * k + 3], value[2], value[3]);
      }
    }
}

template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings,
    const Visible (&visible)[ROW_BLOCKS], u32 operand, Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS],
    int, int lane) {
  const i64 row = tiles_of(args, w);
  const Queries<BLOCKS> queries(operand, lane);
  const u32 keys = by_rows(shared_address(rings.keys), lane),
            values = by_columns(shared_address(rings.values), 0, lane);
  auto copy_keys = [&](int i) {
    const i64 tile = row + tile_at(w, i);
    copy_tile(rings.keys, args.keys + tile * KEYS_BYTES);
    if (thread_index() == 0) cp_async_16((void*)rings.scales, args.tile_scales + tile);
    cp_async_commit();
  };
  if (HELD_QUERIES) sync_threads();  // tiles take the queries' place
  copy_keys(0);
  for (int i = 0; i < w.count; i++) {
    const int tile = tile_at(w, i);
    cp_async_wait<0>();
    sync_threads();  // keys are there, and nobody needs the values of the tile before
    copy_tile(rings.values, args.values + (row + tile) * VALUES_BYTES);
    cp_async_commit();
    const TileScale unit = *rings.scales;
    float s[BLOCKS][N] = {};
    multiply_scores<BLOCKS>(s, queries, keys);
    cp_async_wait<0>();
    sync_threads();  // values are there, and nobody needs the keys
    if (i + 1 < w.count) copy_keys(i + 1);
    u32 p[BLOCKS][N / 2];
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
      if (softmax[b].take(s[b], unit, visible[b], tile, is_clear(w, tile), i == 0, lane & 3, args.softcap, p[b]))
        UNROLL_FOR (int n = 0; n < OUTPUTS; n++) o[b][n] *= softmax[b].rescale[n / 2 % 2];
    }
    multiply_output<BLOCKS>(o, p, values);
  }
}
