// 16-bit tensor cores: scores, softmax and output of the rows of a warpgroup, and the loop over a block's tiles.
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

constexpr int OUTPUTS = PLACES / 2;

DEVICE void start_scores(float (&s)[N], u32 queries, u32 keys) {
  const u64 a = smem_descriptor(queries, 16), b = smem_descriptor(keys, 16);
  wgmma_fence();
  Wgmma<STEP>::template shared_a<false>(s, a, b);
#pragma unroll
  for (int k = 1; k < PLACES / 16; k++)
    Wgmma<STEP>::template shared_a<true>(s, a + ((k / 4 * 128 * GROUP_ROWS + k % 4 * 32) >> 4),
                                              b + ((k / 4 * HALF_TILE + k % 4 * 32) >> 4));
  wgmma_commit();
}

DEVICE void start_output(float (&o)[OUTPUTS], const u32 (&p)[N / 2], u32 values) {
  const u64 b = smem_descriptor(values, HALF_TILE);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEP / 16; k++)
    Wgmma<PLACES>::register_a(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 2048 >> 4));
  wgmma_commit();
}

// The running softmax of the rows of a lane.
struct Softmax {
  float factor[2];   // of this lane's rows g and g + 8
  float shift[2];    // SCORE_SHIFT: what their scores are raised by, times cap_factor
  float row_max[2];  // the reference that exponents are taken from: score plus the exponent of the values' unit
  float row_sum[2];  // of this lane's share of the row, relative to it
  float rescale[2];  // what the output so far is to be multiplied by

  // A score, relative to `from`.
  DEVICE_MEMBER float score(float s, int r, const TileScale& unit, float from, float softcap) const {
    if (!SOFTCAP) return fma_rn(s, factor[r] * unit.key, from);
    const float by = factor[r] * unit.key * cap_factor(softcap);
    return soft_cap(SCORE_SHIFT ? fma_rn(s, by, shift[r]) : s * by, from, softcap);
  }

  // The reference follows the maximum when it has fallen behind by RESCALE_THRESHOLD powers of two, so that the output is
  // seldom rescaled; whether some row's did.
  DEVICE_MEMBER bool follow(const float (&s)[N], const TileScale& unit, const Visible& visible, int tile, int t, float softcap) {
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float x = score(s[i], i / 2 % 2, unit, unit.value, softcap);
      most[i / 2 % 2] = max_f32(most[i / 2 % 2], visible.hides(tile * STEP, i, t) ? MINUS_INFINITY : x);
    }
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = quad_max(most[r]);
      const bool raise = m > row_max[r] + RESCALE_THRESHOLD;
      rescale[r] = raise ? exp2_approx(row_max[r] - m) : 1.0f;
      row_max[r] = raise ? m : row_max[r];
      behind = behind || raise;
    }
    return warp_any(behind);
  }

  // Probabilities times the values' unit, as halves, and their sums. Whether some of the lane's is 2^8 or more, or not a number,
  // as all are of a row that has no reference yet.
  template <bool MASKED>
  DEVICE_MEMBER bool weigh(const float (&s)[N], const TileScale& unit, const Visible& visible, int tile, int t, float softcap,
                           u32 (&p)[N / 2], float (&sum)[2]) const {
    const float from[2] = {unit.value - row_max[0], unit.value - row_max[1]};
    float sums[2][2] = {{0, 0}, {0, 0}};
    u32 large = 0;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const int r = i / 2 % 2;
      float w[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        w[k] = exp2_approx(score(s[i + k], r, unit, from[r], softcap));
        if (MASKED && visible.hides(tile * STEP, i + k, t)) w[k] = 0.0f;
        sums[r][k] += w[k];
      }
      p[i / 2] = pack_f16x2(w[0], w[1]);
      large |= p[i / 2] + 0x24002400u;  // the top bit of a half of 0x5C00 (2^8) or more
    }
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = sums[r][0] + sums[r][1];
    return large & 0x80008000u;
  }
};

template <int VALUE> struct Constant { static constexpr int value = VALUE; };

// The loop over a block's tiles, for the first BLOCKS blocks of 64 rows of a warpgroup. A step is a tile for one of them: its scores
// are multiplied and weighed beside the output of the step before, so that a tile in shared memory serves all of them.
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
