// fp16 wgmmas: scores and output of a warpgroup's rows, and the loop over the tiles of a thread block.
#pragma once
#include "common/hopper.cuh"
#include "prefill/softmax.cuh"

DEVICE void start_scores(float (&s)[N], u32 queries, u32 keys) {
  const u64 a = smem_descriptor(queries, 16), b = smem_descriptor(keys, 16);
  wgmma_fence();
  Wgmma<STEP>::template shared_a<false>(s, a, b);
  UNROLL_FOR (int k = 1; k < PLACES / 16; k++)
    Wgmma<STEP>::template shared_a<true>(s, a + ((k / 4 * 128 * GROUP_ROWS + k % 4 * 32) >> 4),
        b + ((k / 4 * HALF_TILE + k % 4 * 32) >> 4));
  wgmma_commit();
}

DEVICE void start_output(float (&o)[OUTPUTS], const u32 (&p)[N / 2], u32 values) {
  const u64 b = smem_descriptor(values, HALF_TILE);
  wgmma_fence();
  UNROLL_FOR (int k = 0; k < STEP / 16; k++)
    Wgmma<PLACES>::register_a(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 2048 >> 4));
  wgmma_commit();
}

// The loop over tiles, for the first BLOCKS row blocks (of 64 rows) of a warpgroup. A step is one tile for one row
// block: its scores and softmax overlap the output of the previous step. A tile in shared memory serves all row blocks.
template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings,
    const Visible (&visible)[ROW_BLOCKS], u32 queries, Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS],
    int warpgroup, int lane) {
  static_assert(BLOCKS <= 2, "steps of a tile");
  constexpr int LAST = BLOCKS - 1;
  const int t = lane & 3;
  float s[N];
  u32 p[N / 2], next_p[N / 2];
  Place place = {0, 0};  // the values' place
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  // Always zero, which the compiler cannot know. Without it, the compiler would write to registers that wgmmas read.
  const u32 none = (u32)args.num_seqs >> 31;
  // Warpgroups take turns in issuing wgmmas (ping-pong) if they have the same number of row blocks.
  const bool takes_turns = ROW_BLOCKS == 1 || rows_of(args, w) > (ROW_BLOCKS * CONSUMERS - 1) * GROUP_ROWS ||
      rows_of(args, w) <= CONSUMERS * GROUP_ROWS;
  bool needs_rescale;
  // From finished products to probabilities of row block `block`.
  auto take = [&](auto block, int tile, int at, bool follow, u32(&to)[N / 2]) {
    constexpr int b = decltype(block)::value;
    wgmma_fence_operand(s);
    const TileScale unit = rings.scales[at];
    if (b == LAST) {
      sync_warp();
      if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
    }
    needs_rescale = softmax[b].take(s, unit, visible[b], tile, is_clear(w, tile), follow, t, args.softcap, to);
  };
  auto rescale_output = [&](auto block) {
    constexpr int b = decltype(block)::value;
    if (needs_rescale)
      UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[b][i] *= softmax[b].rescale[i / 2 % 2];
  };
  // Computes the output of row block `before`, from the values at `place`, while it computes the scores of row block
  // `block`, from the keys of tile `tile` at `next`.
  auto step = [&](auto before, auto block, int tile, const Place& next, bool last) {
    constexpr int a = decltype(before)::value, b = decltype(block)::value;
    if (b == 0) mbarrier_wait(rings.keys_full + next.slot, next.parity);
    if (takes_turns) bar_sync(3 + warpgroup, 256);
    start_scores(s, queries + b * CONSUMERS * QUERY_BYTES, keys + next.slot * KEYS_BYTES);
    if (a == 0) mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o[a], p, values + place.slot * VALUES_BYTES);
    if (takes_turns && (warpgroup == 0 || !last)) bar_arrive(4 - warpgroup, 256);
    wgmma_wait<1>();
    take(block, tile, next.slot, false, next_p);
    wgmma_wait<0>();
    wgmma_fence_operand(o[a]);
    if (a == LAST && lane == 0) mbarrier_arrive(rings.values_empty + place.slot);
    rescale_output(block);
    UNROLL_FOR (int k = 0; k < N / 2; k++) p[k] = next_p[k] + none;
  };
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_scores(s, queries, keys + place.slot * KEYS_BYTES);
  wgmma_wait<0>();
  take(Constant<0>(), tile_at(w, 0), place.slot, true, p);
  rescale_output(Constant<0>());
  if (takes_turns && warpgroup == 1 && (BLOCKS > 1 || w.count > 1)) bar_arrive(3, 256);
  for (int i = 1;; i++) {
    if constexpr (BLOCKS > 1) step(Constant<0>(), Constant<LAST>(), tile_at(w, i - 1), place, i >= w.count);
    if (i >= w.count) break;
    const Place next = place.next();  // the keys' place
    step(Constant<LAST>(), Constant<0>(), tile_at(w, i), next, BLOCKS == 1 && i + 1 >= w.count);
    place = next;
  }
  if (BLOCKS == 1) mbarrier_wait(rings.values_full + place.slot, place.parity);
  start_output(o[LAST], p, values + place.slot * VALUES_BYTES);
  wgmma_wait<0>();
  wgmma_fence_operand(o[LAST]);
}
