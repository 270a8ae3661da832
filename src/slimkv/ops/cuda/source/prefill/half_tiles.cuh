// The tiles of a block of three or four warpgroups at head size 64, on 8-bit tensor cores: half a tile at a time. There
// are no registers to spare: half_tile_loop.cuh, which takes more of them and gains at 128, spills and loses here.
#pragma once
#include "prefill/bytes.cuh"

// What is known of a tile: whether some of its tokens may be hidden, and whether rows may have no reference yet.
struct FirstTile { static constexpr bool MASKED = true, FIRST = true; };
struct SecondTile { static constexpr bool MASKED = true, FIRST = false; };
struct LaterTile { static constexpr bool MASKED = WINDOW, FIRST = false; };

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible& visible, u32 queries,
                         Softmax& softmax, float (&o)[OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  Sums sums;
  u32 p[2][WORDS];  // of the first and of the second half of a tile
  float digits[4], lift[2] = {0.0f, 0.0f};
  bool add = true;  // what products find in o
  bool lifted = false, needs_rescale;
  Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128 * PRODUCERS), {MINUS_INFINITY, MINUS_INFINITY}};
  if (w.count > PROMOTE) totals.clear();
  Place place = {0, 0};
  const Operands operands(queries, rings, warpgroup);
  // Zero, which the compiler does not know: what has it added is computed again instead of being held in registers.
  const u32 none = (u32)args.num_seqs >> 31;
  // From products that have ended, but for PENDING of them, to weights.
  auto take = [&](auto how, auto pending, int tile, int at, int half, u32 (&to)[WORDS]) {
    constexpr bool MASKED = decltype(how)::MASKED, FIRST = decltype(how)::FIRST;
    const u8* numbers = rings.keys + at * KEYS_BYTES + half * TOKENS * 4;
    const TokenScales scales(numbers, 4 * t);  // before the wait
    wgmma_wait<decltype(pending)::VALUE ? 1 : 0>();
    wgmma_fence_operand(sums.part[0]);
    needs_rescale = lifted;
    softmax.raise_references(lift);
    lifted = false;
    const int first = tile * STEP + half * TOKENS;
    const bool clear = !MASKED || (first + TOKENS <= w.clear_end && (!WINDOW || first >= w.clear_begin));
    u32 large[2];
    auto weigh = [&](auto masked, const TokenScales& scales, u32 zero) {
      large[0] = large[1] = 0;
      softmax.template weigh<decltype(masked)::VALUE>(sums, scales, numbers + zero, visible, first, t, args.softcap, zero, to, large);
    };
    if (!FIRST) {
      if (clear) weigh(No{}, scales, 0);
      else weigh(Yes{}, scales, 0);
    }
    if (FIRST || warp_any((large[0] | large[1]) & TOP_BITS)) {
      if (FIRST || softmax.too_large(to)) {
        needs_rescale |= softmax.template follow<MASKED>(sums, numbers + none, visible, first, t, args.softcap, none);
        const TokenScales again(numbers + none, 4 * t);
        if (MASKED) weigh(Yes{}, again, none);
        else weigh(No{}, again, none);
      }
      lifted = softmax.find_lift(large, lane, lift);
    }
  };
  auto add_output = [&](auto release) { end_output<decltype(release)::VALUE>(softmax, rings, place, o, digits, lane); };
  // To the references of weights that are there, before they are multiplied.
  auto rescale_output = [&] {
    if (needs_rescale) softmax.rescale_output(o);
  };
  // The first half of tile i, beside the output of the second half of the tile before it.
  auto first_half = [&](auto how, int i) {
    const Place next = place.next();
    mbarrier_wait(rings.keys_full + next.slot, next.parity);
    start_sums(sums, operands, next.slot, 0);
    start_output(o, digits, p[1], operands, place.slot, 1, add);
    add = true;
    take(how, Yes{}, tile_at(w, i), next.slot, 0, p[0]);
    add_output(Yes{});
    rescale_output();
    place = next;
  };
  // The second half of tile i, beside the output of the first.
  auto second_half = [&](auto how, int i) {
    start_sums(sums, operands, place.slot, 1);
    mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o, digits, p[0], operands, place.slot, 0, add);
    add = true;
    take(how, Yes{}, tile_at(w, i), place.slot, 1, p[1]);
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.keys_empty + place.slot);
    add_output(No{});
    rescale_output();
    if (i > 0 && i % PROMOTE == 0) {
      totals.add(o, softmax.row_max);
      add = false;
    }
  };
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_sums(sums, operands, place.slot, 0);
  take(FirstTile{}, No{}, tile_at(w, 0), place.slot, 0, p[0]);
  rescale_output();
  second_half(SecondTile{}, 0);
  int i = 1;
  // Without a window, what has masks is among the first tiles.
  for (; !WINDOW && i < w.count && (i < 2 || (tile_at(w, i) + 1) * STEP > w.clear_end); i++) {
    first_half(SecondTile{}, i);
    second_half(SecondTile{}, i);
  }
  for (; i < w.count; i++) {
    first_half(LaterTile{}, i);
    second_half(LaterTile{}, i);
  }
  start_output(o, digits, p[1], operands, place.slot, 1, add);
  add_output(Yes{});
  if (w.count > PROMOTE) totals.add_to(o, softmax.row_max);
}
