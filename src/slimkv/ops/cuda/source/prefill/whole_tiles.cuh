// The tiles of a block of two warpgroups, on 8-bit tensor cores.
#pragma once
#include "prefill/bytes.cuh"

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible& visible, u32 queries,
                         Softmax& softmax, float (&o)[OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  Sums sums;
  u32 p[WORDS], next_p[WORDS];
  float digits[4], lift[2] = {0.0f, 0.0f};
  bool add = true;  // what products find in o
  bool lifted = false, needs_rescale;
  Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128 * PRODUCERS), {MINUS_INFINITY, MINUS_INFINITY}};
  if (w.count > PROMOTE) totals.clear();
  Place place = {0, 0};  // of values
  const Operands operands(queries, rings, warpgroup);
  // Zero, which the compiler does not know: what has it added is computed again, and copied, instead of being held in registers,
  // or written to those that products read.
  const u32 none = (u32)args.num_seqs >> 31;
  // From products that have ended to weights.
  auto take = [&](int tile, int at, bool first, u32 (&to)[WORDS]) {
    const u8* numbers = rings.keys + at * KEYS_BYTES;
#pragma unroll
    for (int h = 0; h < PARTS; h++) wgmma_fence_operand(sums.part[h]);
    const bool clear = (tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin);
    needs_rescale = lifted;
    softmax.raise_references(lift);
    lifted = false;
    const bool weighed = !first && clear;
    u32 large[2] = {0, 0};
    if (weighed) softmax.template weigh<false>(sums, TokenScales(numbers, 4 * t), numbers, visible, tile * STEP, t, args.softcap, 0, to, large);
    if (!weighed || warp_any((large[0] | large[1]) & TOP_BITS)) {
      if (!weighed || softmax.too_large(to)) {
        needs_rescale |= softmax.template follow<true>(sums, numbers + none, visible, tile * STEP, t, args.softcap, none);
        large[0] = large[1] = 0;
        softmax.template weigh<true>(sums, TokenScales(numbers, 4 * t), numbers, visible, tile * STEP, t, args.softcap, 0, to, large);
      }
      lifted = softmax.find_lift(large, lane, lift);
    }
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
  };
  auto add_sums = [&] {
    softmax.add_sums(digits, rings.scales[place.slot].value_inverse);
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.values_empty + place.slot);
  };
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_sums(sums, operands, place.slot, 0);
  wgmma_wait<0>();
  take(tile_at(w, 0), place.slot, true, p);
  for (int i = 1; i < w.count; i++) {
    const Place next = place.next();  // of keys, which are one further than values
    mbarrier_wait(rings.keys_full + next.slot, next.parity);
    start_sums(sums, operands, next.slot, 0);
    if (needs_rescale) softmax.rescale_output(o);  // to the reference of p
    mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o, digits, p, operands, place.slot, 0, add);
    add = true;
    wgmma_wait<1>();
    take(tile_at(w, i), next.slot, false, next_p);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    wgmma_fence_operand(digits);
    add_sums();
    if (i % PROMOTE == 0) {
      if (needs_rescale) softmax.rescale_output(o);
      needs_rescale = false;
      totals.add(o, softmax.row_max);
      add = false;
    }
#pragma unroll
    for (int k = 0; k < WORDS; k++) p[k] = next_p[k] + none;
    place = next;
  }
  if (needs_rescale) softmax.rescale_output(o);
  mbarrier_wait(rings.values_full + place.slot, place.parity);
  start_output(o, digits, p, operands, place.slot, 0, add);
  wgmma_wait<0>();
  wgmma_fence_operand(o);
  wgmma_fence_operand(digits);
  add_sums();
  if (w.count > PROMOTE) totals.add_to(o, softmax.row_max);
}
