// 8-bit products of single warps (mma.sync): int8 scores, e4m3 weights and values, half a tile (TOKENS) at a time. The softmax is that of
// eight_bit.cuh. Products of half a tile are added to the output as float32: the tensor cores keep fewer bits.
#pragma once
#include "prefill/eight_bit.cuh"
#include "prefill/warp_tiles.cuh"

// Where a lane's rows of 16-byte units begin, of matrices of 8 rows that are loaded four at a time, side by side: 64 bytes of each row.
DEVICE u32 four_units(u32 tile, int lane) { return tile + lane % 8 * 128 + ((lane / 8 ^ (lane & 7)) << 4); }

// A warp's 16 rows of queries, which stay in registers.
struct Queries {
  u32 words[D / 32][4];
  DEVICE_MEMBER Queries(u32 operand, int lane) {
    const u32 own = operand + (thread_index() / 32 % 4 * 16 + lane % 16) * 128;
#pragma unroll
    for (int k = 0; k < D / 32; k++) ldmatrix_x4(words[k], own + ((2 * k + lane / 16 ^ (lane & 7)) << 4));
  }
};

DEVICE void multiply_sums(Sums& s, const Queries& queries, u32 keys) {
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    s[4 * n] = s[4 * n + 1] = s[4 * n + 2] = s[4 * n + 3] = 0;
#pragma unroll
    for (int k = 0; k < D / 32; k += 2) {
      u32 key[4];
      ldmatrix_x4(key, (keys ^ 32 * k) + n * 1024);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 (&q)[4] = queries.words[k + h];
        mma_s8_s8((i32*)s + 4 * n, q[0], q[1], q[2], q[3], key[2 * h], key[2 * h + 1]);
      }
    }
  }
}

// 8 rows of values, or of their digits, times the weights of half a tile.
DEVICE void multiply_rows(float (&c)[4], const u32 (&p)[WORDS], u32 rows) {
  u32 value[4];
  ldmatrix_x4(value, rows);
  mma_e4m3_from_zero(c, p[0], p[1], p[2], p[3], value[0], value[1]);
  mma_e4m3(c, p[4], p[5], p[6], p[7], value[2], value[3]);
}

// Scores to weights of half a tile that begins with token `first`; whether the output so far is to be rescaled. `lift`, and `lifted` for some
// row: by how much references are raised before the next half.
DEVICE bool weigh_half(Softmax& softmax, const Sums& sums, const u8* numbers, const Visible& visible, const Work& w, int first, bool very_first,
                       int lane, float softcap, u32 (&p)[WORDS], float (&lift)[2], bool& lifted) {
  const int t = lane & 3;
  const bool masked = first + TOKENS > w.clear_end || (WINDOW && first < w.clear_begin);
  u32 large[2];
  auto weigh = [&] {
    large[0] = large[1] = 0;
    softmax.weigh(sums, TokenScales(numbers, 4 * t), numbers, t, softcap, 0, p, large);
    if (!masked) return;
    Softmax::hide(p, visible, first, t);
    Softmax::find_large(p, large);
  };
  bool needs_rescale = lifted;
  softmax.raise_references(lift);
  if (!very_first) weigh();
  if (very_first || Softmax::too_large(p)) {
    needs_rescale |= softmax.template follow<true>(sums, numbers, visible, first, t, softcap, 0);
    weigh();
  }
  lifted = softmax.find_lift(large, lane, lift);
  return needs_rescale;
}

template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible (&visible)[1], u32 operand,
                         Softmax (&softmax)[1], float (&o)[1][OUTPUTS], int, int lane) {
  static_assert(BLOCKS == 1 && ROW_BLOCKS == 1 && STAGES == 2 && WORDS == 8, "a warp has 16 rows");
  const i64 row = tiles_of(args, w);
  const Queries queries(operand, lane);
  const u32 keys = four_units(shared_address(rings.keys), lane), values = four_units(shared_address(rings.values), lane);
  auto copy = [&](int i) {
    const i64 tile = row + tile_at(w, i);
    copy_tile(rings.keys + i % 2 * KEYS_BYTES, args.keys + tile * KEYS_BYTES);
    copy_tile(rings.values + i % 2 * VALUES_BYTES, args.values + tile * VALUES_BYTES);
    if (thread_index() == 0) cp_async_16((void*)(rings.scales + i % 2), args.tile_scales + tile);
    cp_async_commit();
  };
  float lift[2] = {0.0f, 0.0f};
  bool lifted = false;
  copy(0);
  for (int i = 0; i < w.count; i++) {
    cp_async_wait<0>();
    sync_threads();  // the tile is there, and nobody needs the one before
    if (i + 1 < w.count) copy(i + 1);
    const u32 key_tile = keys + i % 2 * KEYS_BYTES, value_tile = values + i % 2 * VALUES_BYTES;
    const float inverse = rings.scales[i % 2].value_inverse;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      Sums sums;
      u32 p[WORDS];
      multiply_sums(sums, queries, D == 64 ? key_tile ^ 64 * half : key_tile + 128 * TOKENS * half);
      const u8* numbers = rings.keys + i % 2 * KEYS_BYTES + half * TOKENS * 4;
      if (weigh_half(softmax[0], sums, numbers, visible[0], w, tile_at(w, i) * STEP + half * TOKENS, i + half == 0, lane, args.softcap, p, lift, lifted))
        softmax[0].rescale_output(o[0]);
      float c[4];
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        multiply_rows(c, p, (value_tile ^ 64 * half) + n * 1024);
#pragma unroll
        for (int k = 0; k < 4; k++) o[0][4 * n + k] += c[k];
      }
      multiply_rows(c, p, (value_tile ^ 64 * half) + D * 128);
      softmax[0].add_sums(c, inverse);
    }
  }
}
