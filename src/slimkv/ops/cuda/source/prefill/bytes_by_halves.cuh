// The tiles of a block on 8-bit tensor cores: int8 scores, e4m3 weights and the output of the rows of a warpgroup.
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

// Tiles are attended in two steps of 64 tokens: with scores of 128 there would be registers for two warpgroups only.
constexpr int OUTPUTS = D / 2, TOKENS = 64, SCORES = TOKENS / 2, WORDS = SCORES / 4;
// Weights, by their exponents. The largest of e4m3 is what 432 and more are rounded to. A tile with one of those is weighed again,
// from a reference that brings its largest below 2^FRESH_WEIGHT. LARGE ones are good, but the next tile's may not be: the reference
// is raised by LIFT for it.
constexpr float MOST_WEIGHT = 8.754887502163468f, FRESH_WEIGHT = 7.0f, LIFT = 1.0f;
constexpr u32 TO_MOST = 0x02020202u, TO_LARGE = 0x10101010u, TOP_BITS = 0x80808080u;  // to bit 7 of a byte: from 0x7E, from 2^7
// Sums of bytes: scores before their scales.
DEVICE void start_sums(u32 (&s)[SCORES], u32 queries, u32 keys, int half) {
  const u64 a = smem_descriptor(queries, 16), b = smem_descriptor(keys + half * (D == 64 ? 64 : 128 * TOKENS), 16);
  wgmma_fence();
  WgmmaBytes<TOKENS>::template s8<false>(s, a, b);
#pragma unroll
  for (int k = 1; k < D / 32; k++) WgmmaBytes<TOKENS>::template s8<true>(s, a + (k * 32 >> 4), b + (k * 32 >> 4));
  wgmma_commit();
}

// Two sums over the tokens of half a tile: of the values, and of the digits behind them.
DEVICE void start_output(float (&o)[OUTPUTS], float (&digits)[4], const u32 (&p)[WORDS], u32 values, int half, bool add) {
  const u64 b = smem_descriptor(values + half * TOKENS, 16), last = smem_descriptor(values + half * TOKENS + STEP * D, 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TOKENS / 32; k++)
    WgmmaBytes<D>::e4m3(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 32 >> 4), k > 0 || add);
#pragma unroll
  for (int k = 0; k < TOKENS / 32; k++)
    WgmmaBytes<8>::e4m3(digits, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], last + (k * 32 >> 4), k > 0);
  wgmma_commit();
}

// Output so far, out of the way of the tensor cores' short sums: each thread's own, with the references it is relative to.
struct Totals {
  float* mine;  // by fours, those of all threads side by side
  float row_max[2];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) *(Words4*)(mine + i * 2 * ROWS) = {0, 0, 0, 0};
  }
  DEVICE_MEMBER float factor(int r, float now) const { return row_max[r] == MINUS_INFINITY ? 0.0f : exp2_approx(row_max[r] - now); }
  // Adds o, which is relative to `now`.
  DEVICE_MEMBER void add(const float (&o)[OUTPUTS], const float (&now)[2]) {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      Words4 x = *(const Words4*)(mine + i * 2 * ROWS);
      x.x = as_bits(fma_rn(as_float(x.x), by[0], o[i])), x.y = as_bits(fma_rn(as_float(x.y), by[0], o[i + 1]));
      x.z = as_bits(fma_rn(as_float(x.z), by[1], o[i + 2])), x.w = as_bits(fma_rn(as_float(x.w), by[1], o[i + 3]));
      *(Words4*)(mine + i * 2 * ROWS) = x;
    }
    row_max[0] = now[0], row_max[1] = now[1];
  }
  DEVICE_MEMBER void add_to(float (&o)[OUTPUTS], const float (&now)[2]) const {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      const Words4 x = *(const Words4*)(mine + i * 2 * ROWS);
      o[i] = fma_rn(as_float(x.x), by[0], o[i]), o[i + 1] = fma_rn(as_float(x.y), by[0], o[i + 1]);
      o[i + 2] = fma_rn(as_float(x.z), by[1], o[i + 2]), o[i + 3] = fma_rn(as_float(x.w), by[1], o[i + 3]);
    }
  }
};

// Scales of four tokens of a tile.
struct TokenScales {
  float key[4], value[4];
  DEVICE_MEMBER TokenScales(const u8* numbers, int at) {
    const Words4 a = *(const Words4*)(numbers + token_number_at(KEY_SCALE, at));
    const Words4 b = *(const Words4*)(numbers + token_number_at(VALUE_SCALE, at));
    key[0] = as_float(a.x), key[1] = as_float(a.y), key[2] = as_float(a.z), key[3] = as_float(a.w);
    value[0] = as_float(b.x), value[1] = as_float(b.y), value[2] = as_float(b.z), value[3] = as_float(b.w);
  }
};

// The running softmax of the rows of a lane.
struct Softmax {
  float factor[2];   // of this lane's rows g and g + 8
  float row_max[2];  // the reference that exponents are taken from, an integer: it leaves mantissas as they are
  float row_sum[2];  // of this lane's share of the row, relative to it
  float rescale[2];  // what the output so far is to be multiplied by

  // Score i of a tile, relative to `from`, whose key has this scale.
  DEVICE_MEMBER float score(const u32 (&sums)[SCORES], int i, float key, float from, float softcap, u32 none) const {
    const int r = i / 2 % 2;
    const float x = i32_to_f32_rn((i32)(sums[i] + none)) * key;
    if (!SOFTCAP) return fma_rn(x, factor[r], from);
    // cap tanh(x / cap) = cap - 2 cap / (e + 1), where e = exp(2 x / cap)
    const float e = exp2_approx(min_f32(x * (factor[r] * 2.0f * LOG2E * rcp_approx(softcap)), 80.0f));
    return fma_rn(-2.0f * softcap, rcp_approx(e + 1.0f), softcap) + from;
  }

  // Raises the reference of rows whose largest weight would be too large; whether some row's was.
  template <bool MASKED>
  DEVICE_MEMBER bool follow(const u32 (&sums)[SCORES], const u8* numbers, const Visible& visible, int first, int t, float softcap, u32 none) {
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      float logs[4];
#pragma unroll
      for (int k = 0; k < 4; k++) logs[k] = log2_approx(of.value[k]);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        const float x = score(sums, i, of.key[token], logs[token], softcap, none);
        most[i / 2 % 2] = max_f32(most[i / 2 % 2], MASKED && visible.hides(first, i, t) ? MINUS_INFINITY : x);
      }
    }
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = quad_max(most[r]);
      const bool raise = m > MINUS_INFINITY && m >= row_max[r] + MOST_WEIGHT;
      const float wanted = -floor_of(FRESH_WEIGHT - m);  // an integer, FRESH_WEIGHT below m or a little more
      if (raise) rescale[r] *= exp2_approx(row_max[r] - wanted);
      row_max[r] = raise ? wanted : row_max[r];
      behind = behind || raise;
    }
    return warp_any(behind);
  }

  // Weights as e4m3, four in a word, in the order of the operand; `scales`: of the first four tokens. Whether some of the lane's are LARGE, or not a number, as all are
  // of a row that has no reference yet.
  template <bool MASKED>
  DEVICE_MEMBER bool weigh(const u32 (&sums)[SCORES], const TokenScales& scales, const u8* numbers, const Visible& visible, int first, int t, float softcap,
                           u32 none, u32 (&p)[WORDS]) const {
    u32 large = 0;
    const float from[2] = {-row_max[0], -row_max[1]};
#pragma unroll
    for (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of = j == 0 ? scales : TokenScales(numbers, 16 * j + 4 * t);
      float w[8];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        w[k] = exp2_approx(score(sums, i, of.key[token], from[k / 2 % 2], softcap, none)) * of.value[token];
        if (MASKED && visible.hides(first, i, t)) w[k] = 0.0f;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        p[2 * j + r] = pack_e4m3x4(w[2 * r], w[2 * r + 1], w[4 + 2 * r], w[5 + 2 * r]);
        large |= p[2 * j + r] + TO_LARGE;
      }
    }
    return large & TOP_BITS;
  }

  // Whether some weight of the warp is the most there is, or not a number.
  DEVICE_MEMBER static bool too_large(const u32 (&p)[WORDS]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) most |= p[i] + TO_MOST;
    return warp_any(most & TOP_BITS);
  }

  // By how much the references are to be raised for the next tile.
  DEVICE_MEMBER static void find_lift(const u32 (&p)[WORDS], float (&lift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 large = 0;
#pragma unroll
      for (int j = 0; j < WORDS / 2; j++) large |= p[2 * j + r] + TO_LARGE;
      large |= shfl_xor(large, 1);
      large |= shfl_xor(large, 2);
      lift[r] = large & TOP_BITS ? LIFT : 0.0f;
    }
  }

  // What the products with a tile's digits add to the sums: those of the rounded weights, so that they sum to 1.
  DEVICE_MEMBER void add_sums(const float* digits, float inverse) {
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = fma_rn(fma_rn(digits[2 * r + 1], 0.03125f, digits[2 * r]), inverse, row_sum[r]);
  }
};

// What is known of a tile: whether some of its tokens may be hidden, and whether rows may have no reference yet.
struct FirstTile { static constexpr bool MASKED = true, FIRST = true; };
struct SecondTile { static constexpr bool MASKED = true, FIRST = false; };
struct LaterTile { static constexpr bool MASKED = WINDOW, FIRST = false; };
struct Yes { static constexpr bool VALUE = true; };
struct No { static constexpr bool VALUE = false; };

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible& visible, u32 queries,
                         Softmax& softmax, float (&o)[OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  u32 sums[SCORES], p[2][WORDS];  // of the first and of the second half of a tile
  float digits[4], lift[2] = {0.0f, 0.0f};
  bool add = true;  // what products find in o
  bool lifted = false, needs_rescale;
  Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128 * PRODUCERS), {MINUS_INFINITY, MINUS_INFINITY}};
  if (w.count > PROMOTE) totals.clear();
  Place place = {0, 0};
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  // Zero, which the compiler does not know: what has it added is computed again instead of being held in registers.
  const u32 none = (u32)args.num_seqs >> 31;
  // From products that have ended, but for PENDING of them, to weights.
  auto take = [&](auto how, auto pending, int tile, int at, int half, u32 (&to)[WORDS]) {
    constexpr bool MASKED = decltype(how)::MASKED, FIRST = decltype(how)::FIRST;
    const u8* numbers = rings.keys + at * KEYS_BYTES + half * TOKENS * 4;
    const TokenScales scales(numbers, 4 * t);  // before the wait
    wgmma_wait<decltype(pending)::VALUE ? 1 : 0>();
    wgmma_fence_operand(sums);
    needs_rescale = lifted;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      softmax.row_max[r] += lift[r];
      softmax.rescale[r] = lift[r] > 0.0f ? 1.0f / (1 << (int)LIFT) : 1.0f;
      lift[r] = 0.0f;
    }
    lifted = false;
    const int first = tile * STEP + half * TOKENS;
    const bool clear = !MASKED || (first + TOKENS <= w.clear_end && (!WINDOW || first >= w.clear_begin));
    auto weigh = [&](auto masked, const TokenScales& scales, u32 zero) {
      return softmax.template weigh<decltype(masked)::VALUE>(sums, scales, numbers + zero, visible, first, t, args.softcap, zero, to);
    };
    if (FIRST || warp_any(clear ? weigh(No{}, scales, 0) : weigh(Yes{}, scales, 0))) {
      if (FIRST || softmax.too_large(to)) {
        needs_rescale |= softmax.template follow<MASKED>(sums, numbers + none, visible, first, t, args.softcap, none);
        const TokenScales again(numbers + none, 4 * t);
        if (MASKED) weigh(Yes{}, again, none);
        else weigh(No{}, again, none);
      }
      softmax.find_lift(to, lift);
      lifted = warp_any(lift[0] + lift[1] > 0.0f);
    }
  };
  // When products with values, and with their digits, have ended.
  auto add_output = [&](auto release) {
    const float inverse = rings.scales[place.slot].value_inverse;  // before the wait
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    wgmma_fence_operand(digits);
    softmax.add_sums(digits, inverse);
    if (!decltype(release)::VALUE) return;
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.values_empty + place.slot);
  };
  auto rescale_output = [&] {
    if (!needs_rescale) return;
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.row_sum[r] *= softmax.rescale[r];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= softmax.rescale[i / 2 % 2];
  };
  // The first half of tile i, beside the output of the second half of the tile before it.
  auto first_half = [&](auto how, int i) {
    const Place next = place.next();
    mbarrier_wait(rings.keys_full + next.slot, next.parity);
    start_sums(sums, queries, keys + next.slot * KEYS_BYTES, 0);
    start_output(o, digits, p[1], values + place.slot * VALUES_BYTES, 1, add);
    add = true;
    take(how, Yes{}, tile_at(w, i), next.slot, 0, p[0]);
    add_output(Yes{});
    rescale_output();
    place = next;
  };
  // The second half of tile i, beside the output of the first.
  auto second_half = [&](auto how, int i) {
    start_sums(sums, queries, keys + place.slot * KEYS_BYTES, 1);
    mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o, digits, p[0], values + place.slot * VALUES_BYTES, 0, add);
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
  start_sums(sums, queries, keys + place.slot * KEYS_BYTES, 0);
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
  start_output(o, digits, p[1], values + place.slot * VALUES_BYTES, 1, add);
  add_output(Yes{});
  if (w.count > PROMOTE) totals.add_to(o, softmax.row_max);
}
