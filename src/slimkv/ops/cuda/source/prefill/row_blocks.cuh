// Rows of a block whose tiles are unpacked in it (FUSED), on 16-bit tensor cores: warpgroups have one or two blocks of 64 rows.
#pragma once
#include "prefill/halves.cuh"
#include "prefill/lane_rows.cuh"

template <int VALUE> struct Constant { static constexpr int value = VALUE; };

// The first BLOCKS blocks of rows of a warpgroup. A step is a tile for one of them: its scores are multiplied and weighed beside the
// output of the step before, so that a tile that is in shared memory serves all of them.
template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible (&visible)[ROW_BLOCKS], u32 queries,
                         Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS], int warpgroup, int lane) {
  static_assert(BLOCKS <= 2, "steps of a tile");
  constexpr int LAST = BLOCKS - 1;
  const int t = lane & 3;
  float s[N];
  u32 p[N / 2], next_p[N / 2];
  Place place = {0, 0};  // of values
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  // Zero, which the compiler does not know: without it, it would write to the registers that products read.
  const u32 none = (u32)args.num_seqs >> 31;
  bool needs_rescale;
  // From products that have ended to probabilities of rows `block`.
  auto take = [&](auto block, int tile, int at, bool follow, u32 (&to)[N / 2]) {
    constexpr int b = decltype(block)::value;
    wgmma_fence_operand(s);
    const TileScale unit = rings.scales[at];
    if (b == LAST) {
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
  auto rescale_output = [&](auto block) {
    constexpr int b = decltype(block)::value;
    if (needs_rescale)
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) o[b][i] *= softmax[b].rescale[i / 2 % 2];
  };
  // The output of rows `before`, with the values at `place`, beside the scores of rows `block`, with the keys of tile `tile` at `next`.
  auto step = [&](auto before, auto block, int tile, const Place& next, bool last) {
    constexpr int a = decltype(before)::value, b = decltype(block)::value;
    if (b == 0) mbarrier_wait(rings.keys_full + next.slot, next.parity);
    bar_sync(3 + warpgroup, 256);
    start_scores(s, queries + b * CONSUMERS * QUERY_BYTES, keys + next.slot * KEYS_BYTES);
    if (a == 0) mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o[a], p, values + place.slot * VALUES_BYTES);
    if (warpgroup == 0 || !last) bar_arrive(4 - warpgroup, 256);
    wgmma_wait<1>();
    take(block, tile, next.slot, false, next_p);
    wgmma_wait<0>();
    wgmma_fence_operand(o[a]);
    if (a == LAST && lane == 0) mbarrier_arrive(rings.values_empty + place.slot);
    rescale_output(block);
#pragma unroll
    for (int k = 0; k < N / 2; k++) p[k] = next_p[k] + none;
  };
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_scores(s, queries, keys + place.slot * KEYS_BYTES);
  wgmma_wait<0>();
  take(Constant<0>(), tile_at(w, 0), place.slot, true, p);
  rescale_output(Constant<0>());
  if (warpgroup == 1 && (BLOCKS > 1 || w.count > 1)) bar_arrive(3, 256);
  for (int i = 1;; i++) {
    if constexpr (BLOCKS > 1) step(Constant<0>(), Constant<LAST>(), tile_at(w, i - 1), place, i >= w.count);
    if (i >= w.count) break;
    const Place next = place.next();  // of keys
    step(Constant<LAST>(), Constant<0>(), tile_at(w, i), next, BLOCKS == 1 && i + 1 >= w.count);
    place = next;
  }
  if (BLOCKS == 1) mbarrier_wait(rings.values_full + place.slot, place.parity);
  start_output(o[LAST], p, values + place.slot * VALUES_BYTES);
  wgmma_wait<0>();
  wgmma_fence_operand(o[LAST]);
}

// Block of rows b of a warpgroup is its warpgroup's one of the b-th CONSUMERS blocks: few rows leave the last ones of all of them empty.
DEVICE void attend_rows(const PrefillArgs& args, const Work& w, const Rings& rings, u8* operands, int warpgroup, int lane) {
  const int warp = thread_index() / 32 % 4;
  Visible visible[ROW_BLOCKS];
  Softmax softmax[ROW_BLOCKS];
  u8* const operand = operands + warpgroup * QUERY_BYTES;
#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++) {
    const LaneRows rows = prepare_lane_rows(args, w, operand + b * CONSUMERS * QUERY_BYTES, b * CONSUMERS + warpgroup, warp, lane);
    visible[b] = rows.visible, softmax[b] = rows.softmax;
  }
  fence_proxy_async();
  bar_sync(1 + warpgroup, 128);

  float o[ROW_BLOCKS][OUTPUTS];
#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[b][i] = 0.0f;
  const bool all = ROW_BLOCKS == 1 || (min_i32(w.s.queries, args.end_query) - w.first) * args.group_size > CONSUMERS * GROUP_ROWS;
  if (w.count > 0 && all) attend_tiles<ROW_BLOCKS>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);
  if (w.count > 0 && !all) attend_tiles<1>(args, w, rings, visible, shared_address(operand), softmax, o, warpgroup, lane);

#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++)
    if (b == 0 || all)
      store_lane_rows(args, w, softmax[b], o[b], operand + b * CONSUMERS * QUERY_BYTES, b * CONSUMERS + warpgroup, warpgroup, warp, lane);
}
