// fp16 mma.sync, for devices without wgmma: scores and output of a warp's rows, and the loop over the tiles of a thread
// block. All threads copy tiles: values during the score products, the next keys during the output products.
#pragma once
#include "prefill/softmax.cuh"
#include "prefill/warp_operands.cuh"

static_assert(KEYS_BYTES == VALUES_BYTES, "tiles are copied alike");

// Copies a thread's part of a tile.
DEVICE void copy_tile(u8* to, const u8* from) {
  UNROLL_FOR (int i = 0; i < KEYS_BYTES; i += 16 * THREADS)
    if (KEYS_BYTES % (16 * THREADS) == 0 || i + 16 * thread_index() < KEYS_BYTES)
      cp_async_16(to + i + 16 * thread_index(), from + i + 16 * thread_index());
}

// s = Q K^T for all tokens of the tile. A lane's fragment of keys serves all row blocks.
template <int BLOCKS> DEVICE void multiply_scores(float (&s)[BLOCKS][N], const Queries<BLOCKS>& queries, u32 keys) {
  UNROLL_FOR (int k = 0; k < K_STEPS; k++) {
    u32 q[BLOCKS][4];
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) queries.get(k, b, q[b]);
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
  if (HELD_QUERIES) sync_threads();  // tiles overwrite the queries
  copy_keys(0);
  for (int i = 0; i < w.count; i++) {
    const int tile = tile_at(w, i);
    cp_async_wait<0>();
    sync_threads();  // keys have arrived, and the previous tile's values are free
    copy_tile(rings.values, args.values + (row + tile) * VALUES_BYTES);
    cp_async_commit();
    const TileScale unit = *rings.scales;
    float s[BLOCKS][N] = {};
    multiply_scores(s, queries, keys);
    cp_async_wait<0>();
    sync_threads();  // values have arrived, and the keys are free
    if (i + 1 < w.count) copy_keys(i + 1);
    u32 p[BLOCKS][N / 2];
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
      if (softmax[b].take(s[b], unit, visible[b], tile, is_clear(w, tile), i == 0, lane & 3, args.softcap, p[b]))
        UNROLL_FOR (int n = 0; n < OUTPUTS; n++) o[b][n] *= softmax[b].rescale[n / 2 % 2];
    }
    multiply_output<BLOCKS>(o, p, values);
  }
}
