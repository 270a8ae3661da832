// The tiles of a block on 16-bit tensor cores, where a warpgroup has several blocks of 64 rows: a tile that has been unpacked serves
// all of them. A step is a tile for one of them; scores of a step are multiplied and weighed beside the output of the step before,
// which belongs to another block of rows.
#pragma once
#include "prefill/halves.cuh"

template <int VALUE> struct Constant { static constexpr int value = VALUE; };

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible (&visible)[ROW_BLOCKS], u32 queries,
                         Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  float s[N];
  u32 p[N / 2], next_p[N / 2];
  Place place = {0, 0};
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  // Zero, which the compiler does not know: without it, it would write to the registers that products read.
  const u32 none = (u32)args.num_seqs >> 31;
  bool needs_rescale;
  // From scores of rows `b`, whose products have ended, to probabilities.
  auto take = [&](auto block, int tile, int at, bool follow, u32 (&to)[N / 2]) {
    constexpr int b = decltype(block)::value;
    wgmma_fence_operand(s);
    const TileScale unit = rings.scales[at];
    if (b == ROW_BLOCKS - 1) {
      sync_warp();
      if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
    }
    const bool clear = (tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin);
    float sum[2];
    needs_rescale = false;
    auto weigh = [&](bool masked) {
      return masked ? softmax[b].template weigh<true>(s, unit, visible[b], tile, t, args.softcap, to, sum)
                    : softmax[b].template weigh<false>(s, unit, visible[b], tile, t, args.softcap, to, sum);
    };
    if (follow || warp_any(weigh(!clear))) {
      needs_rescale = softmax[b].follow(s, unit, visible[b], tile, t, args.softcap);
      softmax[b].template weigh<true>(s, unit, visible[b], tile, t, args.softcap, to, sum);
      if (needs_rescale) softmax[b].row_sum[0] *= softmax[b].rescale[0], softmax[b].row_sum[1] *= softmax[b].rescale[1];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) softmax[b].row_sum[r] += sum[r] * unit.value_inverse;
  };
  // The output of step (`before`, values at `at`) and the scores of the next one, (`block`, tile `tile`, keys at `next`).
  auto step = [&](auto before, auto block, int tile, const Place& at, const Place& next, bool last) {
    constexpr int a = decltype(before)::value, b = decltype(block)::value;
    if (b == 0) mbarrier_wait(rings.keys_full + next.slot, next.parity);
    bar_sync(3 + warpgroup, 256);
    start_scores(s, queries + b * QUERY_BYTES, keys + next.slot * KEYS_BYTES);
    if (a == 0) mbarrier_wait(rings.values_full + at.slot, at.parity);
    start_output(o[a], p, values + at.slot * VALUES_BYTES);
    if (warpgroup == 0 || !last) bar_arrive(4 - warpgroup, 256);
    wgmma_wait<1>();
    take(block, tile, next.slot, false, next_p);
    wgmma_wait<0>();
    wgmma_fence_operand(o[a]);
    if (a == ROW_BLOCKS - 1 && lane == 0) mbarrier_arrive(rings.values_empty + at.slot);
    if (needs_rescale)
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) o[b][i] *= softmax[b].rescale[i / 2 % 2];
#pragma unroll
    for (int k = 0; k < N / 2; k++) p[k] = next_p[k] + none;
  };
  static_assert(ROW_BLOCKS == 2, "steps of a tile");
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_scores(s, queries, keys + place.slot * KEYS_BYTES);
  wgmma_wait<0>();
  take(Constant<0>(), tile_at(w, 0), place.slot, true, p);
  if (warpgroup == 1) bar_arrive(3, 256);
  for (int i = 0;; i++) {
    const bool last = i + 1 == w.count;
    step(Constant<0>(), Constant<1>(), tile_at(w, i), place, place, last);
    if (last) break;
    const Place next = place.next();
    step(Constant<1>(), Constant<0>(), tile_at(w, i + 1), place, next, false);
    place = next;
  }
  start_output(o[1], p, values + place.slot * VALUES_BYTES);
  wgmma_wait<0>();
  wgmma_fence_operand(o[1]);
}
