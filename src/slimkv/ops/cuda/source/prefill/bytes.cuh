// The tiles of a block on 8-bit tensor cores: int8 scores, e4m3 weights and the output of the rows of a warpgroup.
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

constexpr int OUTPUTS = D / 2;
// Weights, by their exponents. The largest of e4m3 is what 432 and more are rounded to. A tile with one of those is weighed again,
// from a reference that brings its largest below 2^FRESH_WEIGHT. LARGE ones are good, but the next tile's may not be: the reference
// is raised by LIFT for it.
constexpr float MOST_WEIGHT = 8.754887502163468f, FRESH_WEIGHT = 7.0f, LIFT = 1.0f;
constexpr u32 TO_MOST = 0x02020202u, TO_LARGE = 0x10101010u, TOP_BITS = 0x80808080u;  // to bit 7 of a byte: from 0x7E, from 2^7
// Sums of bytes, in parts of as many tokens as a row of keys has dimensions.
constexpr int PARTS = STEP / D > 0 ? STEP / D : 1;
struct Sums {
  u32 part[PARTS][N / PARTS];
  DEVICE_MEMBER float at(int i, u32 none) const { return i32_to_f32_rn((i32)(part[i / (N / PARTS)][i % (N / PARTS)] + none)); }
};

DEVICE void start_sums(Sums& s, u32 queries, u32 keys) {
  const u64 a = smem_descriptor(queries, 16);
  wgmma_fence();
#pragma unroll
  for (int h = 0; h < PARTS; h++) {
    const u64 b = smem_descriptor(keys + h * D, 16);
    WgmmaBytes<STEP / PARTS>::template s8<false>(s.part[h], a, b);
#pragma unroll
    for (int k = 1; k < D / 32; k++)
      WgmmaBytes<STEP / PARTS>::template s8<true>(s.part[h], a + (k * 32 >> 4), b + (k * 32 >> 4));
  }
  wgmma_commit();
}

// Two sums over the tokens of a tile: of the values, and of the digits behind them.
DEVICE void start_output(float (&o)[OUTPUTS], float (&digits)[4], const u32 (&p)[N / 4], u32 values, bool add) {
  const u64 b = smem_descriptor(values, 16), last = smem_descriptor(values + STEP * D, 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEP / 32; k++)
    WgmmaBytes<D>::e4m3(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 32 >> 4), k > 0 || add);
#pragma unroll
  for (int k = 0; k < STEP / 32; k++)
    WgmmaBytes<8>::e4m3(digits, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], last + (k * 32 >> 4), k > 0);
  wgmma_commit();
}

// Output so far, out of the way of the tensor cores' short sums: each thread's own, with the references it is relative to.
struct Totals {
  float* mine;  // every 1,024th float of shared memory, by fours
  float row_max[2];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) *(Words4*)(mine + i * 256) = {0, 0, 0, 0};
  }
  DEVICE_MEMBER float factor(int r, float now) const { return row_max[r] == MINUS_INFINITY ? 0.0f : exp2_approx(row_max[r] - now); }
  // Adds o, which is relative to `now`.
  DEVICE_MEMBER void add(const float (&o)[OUTPUTS], const float (&now)[2]) {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      Words4 x = *(const Words4*)(mine + i * 256);
      x.x = as_bits(fma_rn(as_float(x.x), by[0], o[i])), x.y = as_bits(fma_rn(as_float(x.y), by[0], o[i + 1]));
      x.z = as_bits(fma_rn(as_float(x.z), by[1], o[i + 2])), x.w = as_bits(fma_rn(as_float(x.w), by[1], o[i + 3]));
      *(Words4*)(mine + i * 256) = x;
    }
    row_max[0] = now[0], row_max[1] = now[1];
  }
  DEVICE_MEMBER void add_to(float (&o)[OUTPUTS], const float (&now)[2]) const {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      const Words4 x = *(const Words4*)(mine + i * 256);
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
  DEVICE_MEMBER float score(const Sums& sums, int i, float key, float from, float softcap, u32 none) const {
    const int r = i / 2 % 2;
    const float x = sums.at(i, none) * key;
    if (!SOFTCAP) return fma_rn(x, factor[r], from);
    // cap tanh(x / cap) = cap - 2 cap / (e + 1), where e = exp(2 x / cap)
    const float e = exp2_approx(min_f32(x * (factor[r] * 2.0f * LOG2E * rcp_approx(softcap)), 80.0f));
    return fma_rn(-2.0f * softcap, rcp_approx(e + 1.0f), softcap) + from;
  }

  // Raises the reference of rows whose largest weight would be too large; whether some row's was.
  DEVICE_MEMBER bool follow(const Sums& sums, const u8* numbers, const Visible& visible, int tile, int t, float softcap, u32 none) {
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      float logs[4];
#pragma unroll
      for (int k = 0; k < 4; k++) logs[k] = log2_approx(of.value[k]);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        const float x = score(sums, i, of.key[token], logs[token], softcap, none);
        most[i / 2 % 2] = max_f32(most[i / 2 % 2], visible.hides(tile * STEP, i, t) ? MINUS_INFINITY : x);
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

  // Weights as e4m3, four in a word, in the order of the operand. Whether some of the lane's are LARGE, or not a number, as all are
  // of a row that has no reference yet.
  template <bool MASKED>
  DEVICE_MEMBER bool weigh(const Sums& sums, const u8* numbers, const Visible& visible, int tile, int t, float softcap, u32 (&p)[N / 4]) const {
    u32 large = 0;
    const float from[2] = {-row_max[0], -row_max[1]};
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      float w[8];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        w[k] = exp2_approx(score(sums, i, of.key[token], from[k / 2 % 2], softcap, 0)) * of.value[token];
        if (MASKED && visible.hides(tile * STEP, i, t)) w[k] = 0.0f;
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
  DEVICE_MEMBER static bool too_large(const u32 (&p)[N / 4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < N / 4; i++) most |= p[i] + TO_MOST;
    return warp_any(most & TOP_BITS);
  }

  // By how much the references are to be raised for the next tile.
  DEVICE_MEMBER static void find_lift(const u32 (&p)[N / 4], float (&lift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 large = 0;
#pragma unroll
      for (int j = 0; j < N / 8; j++) large |= p[2 * j + r] + TO_LARGE;
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

DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, const Visible& visible, u32 queries,
                         Softmax& softmax, float (&o)[OUTPUTS], int warpgroup, int lane) {
  const int t = lane & 3;
  Sums sums;
  u32 p[N / 4], next_p[N / 4];
  float digits[4], lift[2] = {0.0f, 0.0f};
  bool add = true;  // what products find in o
  bool lifted = false, needs_rescale;
  Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128 * PRODUCERS), {MINUS_INFINITY, MINUS_INFINITY}};
  if (w.count > PROMOTE) totals.clear();
  Place place = {0, 0};  // of values
  const u32 keys = shared_address(rings.keys), values = shared_address(rings.values);
  // Zero, which the compiler does not know: what has it added is computed again, and copied, instead of being held in registers,
  // or written to those that products read.
  const u32 none = (u32)args.num_seqs >> 31;
  // From products that have ended to weights.
  auto take = [&](int tile, int at, bool first, u32 (&to)[N / 4]) {
    const u8* numbers = rings.keys + at * KEYS_BYTES;
#pragma unroll
    for (int h = 0; h < PARTS; h++) wgmma_fence_operand(sums.part[h]);
    const bool clear = (tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin);
    needs_rescale = lifted;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      softmax.row_max[r] += lift[r];
      softmax.rescale[r] = lift[r] > 0.0f ? 1.0f / (1 << (int)LIFT) : 1.0f;
      lift[r] = 0.0f;
    }
    lifted = false;
    const bool weighed = !first && clear;
    if (!weighed || warp_any(softmax.template weigh<false>(sums, numbers, visible, tile, t, args.softcap, to))) {
      if (!weighed || softmax.too_large(to)) {
        needs_rescale |= softmax.follow(sums, numbers + none, visible, tile, t, args.softcap, none);
        softmax.template weigh<true>(sums, numbers, visible, tile, t, args.softcap, to);
      }
      softmax.find_lift(to, lift);
      lifted = warp_any(lift[0] + lift[1] > 0.0f);
    }
    sync_warp();
    if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
  };
  auto add_sums = [&] {
    softmax.add_sums(digits, rings.scales[place.slot].value_inverse);
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
  mbarrier_wait(rings.keys_full + place.slot, place.parity);
  start_sums(sums, queries, keys + place.slot * KEYS_BYTES);
  wgmma_wait<0>();
  take(tile_at(w, 0), place.slot, true, p);
  rescale_output();
  for (int i = 1; i < w.count; i++) {
    const Place next = place.next();  // of keys, which are one further than values
    mbarrier_wait(rings.keys_full + next.slot, next.parity);
    start_sums(sums, queries, keys + next.slot * KEYS_BYTES);
    mbarrier_wait(rings.values_full + place.slot, place.parity);
    start_output(o, digits, p, values + place.slot * VALUES_BYTES, add);
    add = true;
    wgmma_wait<1>();
    take(tile_at(w, i), next.slot, false, next_p);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    wgmma_fence_operand(digits);
    add_sums();
    rescale_output();
    if (i % PROMOTE == 0) {
      totals.add(o, softmax.row_max);
      add = false;
    }
#pragma unroll
    for (int k = 0; k < N / 4; k++) p[k] = next_p[k] + none;
    place = next;
  }
  mbarrier_wait(rings.values_full + place.slot, place.parity);
  start_output(o, digits, p, values + place.slot * VALUES_BYTES, add);
  wgmma_wait<0>();
  wgmma_fence_operand(o);
  wgmma_fence_operand(digits);
  add_sums();
  if (w.count > PROMOTE) totals.add_to(o, softmax.row_max);
}
