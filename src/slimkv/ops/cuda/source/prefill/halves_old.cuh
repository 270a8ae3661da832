// The tiles of a block on 16-bit tensor cores: scores, softmax and output of the rows of a warpgroup.
#pragma once
#include "common/hopper.cuh"
#include "prefill/softmax.cuh"

constexpr int OUTPUTS = D / 2;

DEVICE void start_scores(float (&s)[N], u32 queries, u32 keys) {
  const u64 a = smem_descriptor(queries, 16), b = smem_descriptor(keys, 16);
  wgmma_fence();
  Wgmma<STEP>::template shared_a<false>(s, a, b);
#pragma unroll
  for (int k = 1; k < D / 16; k++)
    Wgmma<STEP>::template shared_a<true>(s, a + ((k / 4 * 128 * GROUP_ROWS + k % 4 * 32) >> 4),
                                              b + ((k / 4 * HALF_TILE + k % 4 * 32) >> 4));
  wgmma_commit();
}

DEVICE void start_output(float (&o)[D / 2], const u32 (&p)[N / 2], u32 values) {
  const u64 b = smem_descriptor(values, HALF_TILE);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEP / 16; k++)
    Wgmma<D>::register_a(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 2048 >> 4));
  wgmma_commit();
}

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible& visible, u32 queries, Softmax& softmax,
                         float (&o)[OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  float s[N];
  u32 p[N / 2];
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  const TileScale* tile_scales = args.tile_scales + ((i64)w.s.rank * args.num_kv_heads + w.head) * args.tiles - args.first_tile + w.tile;
  TileScale unit = *tile_scales;
  int tile = w.tile;
  auto apply_mask = [&] {
    if ((tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin)) return;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int token = tile * STEP + 8 * (i / 4) + 2 * t + i % 2, r = i / 2 % 2;
      if (token >= visible.end[r] || (WINDOW && token < visible.begin[r])) s[i] = MINUS_INFINITY;
    }
  };
  auto rescale_output = [&] {
    if (softmax.needs_rescale)
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] *= softmax.rescale[i / 2 % 2];
  };
  // Once products do not read p any more.
  auto pack = [&] {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pack_f16x2(s[2 * i], s[2 * i + 1]);
  };
  // From products that have ended to probabilities.
  auto take = [&](int at) {
    wgmma_fence_operand(s);
    if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
    if (SOFTCAP) softmax.cap(s, unit, args.softcap);
    apply_mask();
    softmax.step(s, unit);
  };
  mbarrier_wait(rings.keys_full, 0);
  start_scores(s, queries, keys);
  wgmma_wait<0>();
  take(0);
  rescale_output();
  pack();
  if (warpgroup == 1 && w.count > 1) bar_arrive(3, 256);
  int slot = 0;       // of values; keys are one further
  u32 parity = 0;
  for (int i = 1; i < w.count; i++) {
    const int next = slot + 1 == STAGES ? 0 : slot + 1;
    const u32 next_parity = next ? parity : parity ^ 1;
    unit = tile_scales[-i];
    tile--;
    mbarrier_wait(rings.keys_full + next, next_parity);
    bar_sync(3 + warpgroup, 256);
    start_scores(s, queries, keys + next * KEYS_BYTES);
    mbarrier_wait(rings.values_full + slot, parity);
    start_output(o, p, values + slot * VALUES_BYTES);
    if (warpgroup == 0 || i + 1 < w.count) bar_arrive(4 - warpgroup, 256);
    wgmma_wait<1>();
    take(next);
    keep_before(softmax.row_sum[0], softmax.row_sum[1]);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    if (lane == 0) mbarrier_arrive(rings.values_empty + slot);
    rescale_output();
    pack();
    slot = next, parity = next_parity;
  }
  mbarrier_wait(rings.values_full + slot, parity);
  start_output(o, p, values + slot * VALUES_BYTES);
  wgmma_wait<0>();
  wgmma_fence_operand(o);
}
