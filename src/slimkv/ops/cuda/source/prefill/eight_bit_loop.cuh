// The loop over the tiles of a thread block with 8-bit wgmmas, half a tile at a time. Scores of only 64 tokens leave
// enough registers for three warpgroups. The probabilities of a tile's two halves have separate registers, so that none
// are copied.
//
// All halves but the first run through one loop. Exceptions (masks, large probabilities, promotion, the end) are behind
// one branch per half: the warp vote on large probabilities also includes the exceptions known beforehand. Work that
// needs no scores (ring positions, barriers) overlaps the score products.
#pragma once
#include "prefill/eight_bit.cuh"

template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible (&visible_of)[1],
    u32 queries, Softmax (&softmax_of)[1], float (&o_of)[1][OUTPUTS], int warpgroup, int lane) {
  static_assert(BLOCKS == 1 && ROW_BLOCKS == 1, "a warpgroup has one block of rows");
  const Visible& visible = visible_of[0];
  Softmax& softmax = softmax_of[0];
  float (&o)[OUTPUTS] = o_of[0];
  const int t = lane & 3;
  Sums sums;
  u32 p[2][WORDS], large[2];  // for the first and the second half of a tile
  float digits[4], lift[2] = {0.0f, 0.0f};
  bool add = true;  // whether products add to o
  bool lifted = false, needs_rescale = false;
  Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128 * PRODUCERS), {MINUS_INFINITY, MINUS_INFINITY}};
  if (w.count > PROMOTE) totals.clear();
  Place place = {0, 0};
  const Operands operands(queries, rings, warpgroup);
  // Always zero, which the compiler cannot know: it recomputes sums with it instead of keeping them in registers.
  const u32 none = (u32)args.num_seqs >> 31;
  // Without a window, only tiles before this one have masks.
  const int clear_from = max_i32(2, w.tile + 1 - w.clear_end / STEP);
  int special = 0;  // the next tile that may have masks, precedes a promotion, or is the last
  auto add_output = [&](auto release) { end_output<decltype(release)::value>(softmax, rings, place, o, digits, lane); };
  auto first_token = [&](int i, int half) { return tile_at(w, i) * STEP + half * TOKENS; };
  auto is_clear = [&](int first) { return first + TOKENS <= w.clear_end && (!WINDOW || first >= w.clear_begin); };
  auto numbers_of = [&](const Place& at, int half) { return rings.keys + at.slot * KEYS_BYTES + half * TOKENS * 4; };
  // Turns finished scores into probabilities, overlapping products of the output. Returns whether look_at is needed.
  auto weigh = [&](int i, const Place& at, int half, u32(&to)[WORDS], auto release) {
    const u8* numbers = numbers_of(at, half);
    const TokenScales scales(numbers, 4 * t);  // before the wait
    wgmma_wait<1>();
    wgmma_fence_operand(sums);
    needs_rescale = lifted;
    softmax.raise_row_max(lift);
    lifted = false;
    large[0] = i >= special || (WINDOW && !is_clear(first_token(i, half))) ? TOP_BITS : 0, large[1] = 0;
    softmax.weigh(sums, scales, numbers, t, args.softcap, 0, to, large);
    const bool look = warp_any((large[0] | large[1]) & TOP_BITS);
    add_output(release);  // hides the latency of the vote
    return look;
  };
  // Masks probabilities, recomputes them if one is too large (FIRST: computes them), and sets the lift for large ones.
  auto look_at = [&](auto very_first, int i, const Place& at, int half, u32(&to)[WORDS]) {
    constexpr bool FIRST = decltype(very_first)::value;
    const u8* numbers = numbers_of(at, half) + none;
    const int first = first_token(i + none, half);
    const bool masked = !is_clear(first);
    if (!FIRST) {
      if (masked) Softmax::apply_mask(to, visible, first, t);
      Softmax::find_large(to, large);
    }
    if (FIRST || Softmax::too_large(to)) {
      if (masked)
        needs_rescale |= softmax.template update_max<true>(sums, numbers, visible, first, t, args.softcap, none);
      else needs_rescale |= softmax.template update_max<false>(sums, numbers, visible, first, t, args.softcap, none);
      softmax.weigh(sums, TokenScales(numbers, 4 * t), numbers, t, args.softcap, none, to, large);
      if (masked) Softmax::apply_mask(to, visible, first, t);
      Softmax::find_large(to, large);
    }
    lifted = softmax.find_lift(large, lane, lift);
  };
  // Rescales the output to the current running maxima before its next products; overlaps the next score products.
  auto rescale_output = [&] {
    if (needs_rescale) softmax.rescale_output(o);
  };
  // After the second half of a tile that needed look_at: promotes if due. Returns whether the tile was the last.
  auto end_tile = [&](int i) {
    special = i + 1 < clear_from ? i + 1 : min_i32((i / PROMOTE + 1) * PROMOTE, w.count - 1);
    if (i > 0 && i % PROMOTE == 0) {
      rescale_output(), needs_rescale = false;
      totals.add<true>(o, softmax.row_max);
      add = false;
    }
    return i + 1 == w.count;
  };
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_sums(sums, operands, place.slot, 0);
  wgmma_wait<0>();
  wgmma_fence_operand(sums);
  softmax.raise_row_max(lift);
  look_at(Yes{}, 0, place, 0, p[0]);
  for (int i = 0;; i++) {
    // The scores of the second half of tile i, overlapping the output of the first half.
    start_sums(sums, operands, place.slot, 1);
    rescale_output();
    mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o, digits, p[0], operands, place.slot, 0, add);
    add = true;
    const Place next = place.next();
    if (i + 1 < w.count) mbarrier_wait(rings.keys_full + next.slot, next.parity);
    if (weigh(i, place, 1, p[1], No{})) {
      look_at(No{}, i, place, 1, p[1]);
      if (end_tile(i)) break;
    }
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.keys_empty + place.slot);
    // The scores of the first half of the next tile, overlapping the output of the second half of this one.
    start_sums(sums, operands, next.slot, 0);
    rescale_output();
    start_output(o, digits, p[1], operands, place.slot, 1, add);
    add = true;
    if (weigh(i + 1, next, 0, p[0], Yes{})) look_at(No{}, i + 1, next, 0, p[0]);
    place = next;
  }
  rescale_output();
  start_output(o, digits, p[1], operands, place.slot, 1, add);
  add_output(Yes{});
  if (w.count > PROMOTE) totals.add<false>(o, softmax.row_max);
}
