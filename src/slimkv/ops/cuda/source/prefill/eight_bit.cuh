// 8-bit wgmmas: int8 scores, e4m3 probabilities and output of a warpgroup's rows, half a tile (TOKENS) at a time.
#pragma once
#include "common/hopper.cuh"
#include "prefill/work.cuh"

// Limits of probabilities, as exponents. From 432 on they round to the largest e4m3; a tile with such a probability is
// recomputed with a running maximum that brings its largest below 2^FRESH_WEIGHT. LARGE ones are valid, but the next
// tile's may not be, so the running maximum is raised by LIFT. A LIFT of 2 recomputes a third fewer tiles than 1 does.
constexpr float MOST_WEIGHT = 8.754887502163468f, FRESH_WEIGHT = 7.0f, LIFT = 2.0f;
constexpr u32 TO_MOST = 0x02020202u, TO_LARGE = 0x10101010u,
              TOP_BITS = 0x80808080u;  // adding TO_MOST sets bit 7 of bytes from 0x7E on, TO_LARGE from 2^7 on
// Integer scores, without scales.
using Sums = u32[SCORES];

typedef Constant<1> Yes;
typedef Constant<0> No;

// Descriptors of a warpgroup's queries and of the rings. Beyond head size 64, the compiler recomputes descriptors in
// the loop; as sums with one common descriptor, they take fewer instructions.
struct Operands {
  u64 queries, keys, values;
  DEVICE_MEMBER Operands(u32 own_queries, const Rings& rings, int warpgroup) {
    if (D == 64) {
      queries = smem_descriptor(own_queries, 16), keys = smem_descriptor(shared_address(rings.keys), 16);
      values = smem_descriptor(shared_address(rings.values), 16);
    } else {
      const u64 first = smem_descriptor(shared_address(rings.keys - KEYS_AT), 16);
      queries = first + (u32)(warpgroup * (QUERY_BYTES >> 4)), keys = first + (KEYS_AT >> 4),
      values = first + (VALUES_AT >> 4);
    }
  }
};

// Issues the scores of half `half` of the tile in `slot`.
DEVICE void start_sums(Sums& s, const Operands& operands, int slot, int half) {
  const u64 a = operands.queries, tile = operands.keys + (u64)(u32)slot * (KEYS_BYTES >> 4);
  wgmma_fence();
  const u64 b =
      tile + ((D == 64 ? 64 : 128 * TOKENS) * half >> 4);  // tiles.cuh: at head size 64 halves are side by side
  WgmmaBytes<TOKENS>::template s8<false>(s, a, b);
  UNROLL_FOR (int k = 1; k < D / 32; k++)
    WgmmaBytes<TOKENS>::template s8<true>(s, a + (k * 32 >> 4), b + (k * 32 >> 4));
  wgmma_commit();
}

// Issues two products with probabilities: of the values, and of the digits that follow them (tiles.cuh).
DEVICE void start_output(float (&o)[OUTPUTS], float (&digits)[4], const u32 (&p)[WORDS], const Operands& operands,
    int slot, int half, bool add) {
  const u64 b = operands.values + (u64)(u32)slot * (VALUES_BYTES >> 4) + (half * TOKENS >> 4),
            last = b + (STEP * D >> 4);
  wgmma_fence();
  UNROLL_FOR (int k = 0; k < TOKENS / 32; k++)
    WgmmaBytes<D>::e4m3(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 32 >> 4), k > 0 || add);
  UNROLL_FOR (int k = 0; k < TOKENS / 32; k++)
    WgmmaBytes<8>::e4m3(digits, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], last + (k * 32 >> 4), k > 0);
  wgmma_commit();
}

// Output totals in fp32, to which the tensor cores' 14-bit sums are promoted, and the running maxima they refer to.
struct Totals {
  float* mine;  // this thread's groups of four, interleaved with those of the other threads
  float row_max[2];

  DEVICE_MEMBER void clear() {
    UNROLL_FOR (int i = 0; i < D / 2; i += 4) *(Words4*)(mine + i * 2 * ROWS) = {0, 0, 0, 0};
  }
  DEVICE_MEMBER float factor(int r, float now) const {
    return row_max[r] == MINUS_INFINITY ? 0.0f : exp2_approx(row_max[r] - now);
  }
  // Adds the totals and o, which is relative to maxima `now`. The sum replaces the totals or o.
  template <bool TO_TOTALS> DEVICE_MEMBER void add(float (&o)[OUTPUTS], const float (&now)[2]) {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
    UNROLL_FOR (int i = 0; i < D / 2; i += 4) {
      Words4& x = *(Words4*)(mine + i * 2 * ROWS);
      const Words4 y = x;
      const float sums[4] = {fma_rn(as_float(y.x), by[0], o[i]), fma_rn(as_float(y.y), by[0], o[i + 1]),
          fma_rn(as_float(y.z), by[1], o[i + 2]), fma_rn(as_float(y.w), by[1], o[i + 3])};
      if constexpr (TO_TOTALS) x = {as_bits(sums[0]), as_bits(sums[1]), as_bits(sums[2]), as_bits(sums[3])};
      else
        UNROLL_FOR (int k = 0; k < 4; k++) o[i + k] = sums[k];
    }
    if (TO_TOTALS) row_max[0] = now[0], row_max[1] = now[1];
  }
};

// The online softmax of a lane's rows. row_max is an integer, so that rescaling is exact.
struct Softmax : RowState {
  float rescale[2];  // the factors for the output so far

  // Base-2 score i, plus `from`; `key`: the scale of its key.
  DEVICE_MEMBER float score(const Sums& sums, int i, float key, float from, float softcap, u32 none) const {
    const int r = i / 2 % 2;
    const float x = i32_to_f32_rn((i32)(sums[i] + none)) * key;
    return SOFTCAP ? capped(x, r, 1.0f, softcap) + from : fma_rn(x, factor[r], from);
  }

  // Raises the running maximum of rows whose largest probability would be too large. Returns whether there are any.
  template <bool MASKED>
  DEVICE_MEMBER bool update_max(const Sums& sums, const u8* numbers, const Visible& visible, int first, int t,
      float softcap, u32 none) {
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      float logs[4];
      UNROLL_FOR (int k = 0; k < 4; k++) logs[k] = log2_approx(of.value[k]);
      UNROLL_FOR (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        const float x = score(sums, i, of.key[token], logs[token], softcap, none);
        most[i / 2 % 2] = max_f32(most[i / 2 % 2], MASKED && visible.masks(first, i, t) ? MINUS_INFINITY : x);
      }
    }
    bool behind = false;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      const float m = quad_max(most[r]);
      const bool raise = m > MINUS_INFINITY && m >= row_max[r] + MOST_WEIGHT;
      const float wanted = -floor_of(FRESH_WEIGHT - m);  // an integer, FRESH_WEIGHT or a little less below m
      if (raise) rescale[r] *= exp2_approx(row_max[r] - wanted);
      row_max[r] = raise ? wanted : row_max[r];
      behind = behind || raise;
    }
    return warp_any(behind);
  }

  // Probabilities as e4m3, four per word, in operand order; `scales`: of the first four tokens. Sets one of TOP_BITS in
  // `large` if a probability in the lane's row is LARGE or NaN, as all are before the row has a running maximum.
  DEVICE_MEMBER void weigh(const Sums& sums, const TokenScales& scales, const u8* numbers, int t, float softcap,
      u32 none, u32 (&p)[WORDS], u32 (&large)[2]) const {
    const float from[2] = {-row_max[0], -row_max[1]};
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of = j == 0 ? scales : TokenScales(numbers, 16 * j + 4 * t);
      float w[8];
      UNROLL_FOR (int k = 0; k < 8; k++) {
        const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
        w[k] = exp2_approx(score(sums, i, of.key[token], from[k / 2 % 2], softcap, none)) * of.value[token];
      }
      UNROLL_FOR (int r = 0; r < 2; r++) {
        p[2 * j + r] = pack_e4m3x4(w[2 * r], w[2 * r + 1], w[4 + 2 * r], w[5 + 2 * r]);
        large[r] |= p[2 * j + r] + TO_LARGE;
      }
    }
  }

  // Clears the probabilities of masked tokens.
  DEVICE_MEMBER static void apply_mask(u32 (&p)[WORDS], const Visible& visible, int first, int t) {
    UNROLL_FOR (int i = 0; i < SCORES; i++)
      if (visible.masks(first, i, t)) p[2 * (i / 8) + i / 2 % 2] &= ~(0xFFu << 8 * (i / 4 % 2 * 2 + i % 2));
  }

  // Sets `large` as `weigh` does, from given probabilities.
  DEVICE_MEMBER static void find_large(const u32 (&p)[WORDS], u32 (&large)[2]) {
    large[0] = large[1] = 0;
    UNROLL_FOR (int i = 0; i < WORDS; i++) large[i % 2] |= p[i] + TO_LARGE;
  }

  // Whether any probability of the warp is the largest e4m3, or NaN.
  DEVICE_MEMBER static bool too_large(const u32 (&p)[WORDS]) {
    u32 most = 0;
    UNROLL_FOR (int i = 0; i < WORDS; i++) most |= p[i] + TO_MOST;
    return warp_any(most & TOP_BITS);
  }

  // The amounts by which to raise the running maxima for the next tile. Returns whether any row of the warp has one.
  DEVICE_MEMBER static bool find_lift(const u32 (&large)[2], int lane, float (&lift)[2]) {
    u32 lanes[2];
    UNROLL_FOR (int r = 0; r < 2; r++) {
      lanes[r] = warp_ballot(large[r] & TOP_BITS);
      lift[r] = lanes[r] >> (lane & 28) & 15 ? LIFT : 0.0f;
    }
    return lanes[0] | lanes[1];
  }

  // Raises the running maxima by `lift`, clears `lift`, and sets the rescaling factors of the output.
  DEVICE_MEMBER void raise_row_max(float (&lift)[2]) {
    UNROLL_FOR (int r = 0; r < 2; r++) {
      row_max[r] += lift[r];
      rescale[r] = lift[r] > 0.0f ? 1.0f / (1 << (int)LIFT) : 1.0f;
      lift[r] = 0.0f;
    }
  }

  DEVICE_MEMBER void rescale_output(float (&o)[OUTPUTS]) {
    UNROLL_FOR (int r = 0; r < 2; r++) row_sum[r] *= rescale[r];
    UNROLL_FOR (int i = 0; i < OUTPUTS; i++) o[i] *= rescale[i / 2 % 2];
  }

  // Adds the products with a tile's digits to the row sums, which thus sum up the rounded probabilities.
  DEVICE_MEMBER void add_sums(const float* digits, float inverse) {
    UNROLL_FOR (int r = 0; r < 2; r++)
      row_sum[r] = fma_rn(fma_rn(digits[2 * r + 1], 0.03125f, digits[2 * r]), inverse, row_sum[r]);
  }
};

// Waits for the products with values and digits. RELEASE: releases the values' slot.
template <bool RELEASE>
DEVICE void end_output(Softmax& softmax, const Rings& rings, const Place& place, float (&o)[OUTPUTS],
    float (&digits)[4], int lane) {
  const float inverse = rings.scales[place.slot].value_inverse;  // before the wait
  wgmma_wait<0>();
  wgmma_fence_operand(o);
  wgmma_fence_operand(digits);
  softmax.add_sums(digits, inverse);
  if (!RELEASE) return;
  sync_warp();
  if (lane == 0) mbarrier_arrive(rings.values_empty + place.slot);
}
