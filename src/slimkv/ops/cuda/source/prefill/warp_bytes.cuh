// Integer mma.sync products (INTEGERS), for devices without warpgroup products: int8 scores, weights as unsigned bytes,
// and the loop over a block's tiles, half a tile at a time. Shared memory has one tile of keys and one of values; all
// threads copy one half while the other is attended.
//
// Weights of half a tile are relative to the row's largest score there, so that every half has all 8 bits, or (UNEVEN)
// to the largest score plus the logarithm of the value's scale: a token with a small value does not use up the bits.
// Integer products of half a tile are added to the output in fp32.
#pragma once
#include "prefill/warp_operands.cuh"

// Sums that start here are the bits of a float, MAGIC_FLOAT plus the sum, below 2^22: no conversion.
constexpr i32 MAGIC_BITS = 0x4B400000;
constexpr float BYTE_MAGIC = 8388608.0f;  // plus a number below 256: its nearest integer in the lowest byte
// In powers of two: how far scores may rise above the reference of the output.
constexpr float MOST_ABOVE = 32.0f;
constexpr float LEAST_LOG = -60.0f;  // of a value's scale, which may be 0

// The running softmax of the rows of a lane.
struct Softmax {
  float factor[2];  // of this lane's rows g and g + 8
  float shift[2];  // SCORE_SHIFT: what their scores are raised by, times cap_factor
  float row_max[2];  // the reference that exponents of the output and of the sums are taken from: a former maximum
  float row_sum[2];  // of this lane's share of the row, relative to it

  DEVICE_MEMBER float output_factor() const { return 1.0f; }
  // A score before `factor` or, SOFTCAP, the capped one. `key`: its token's scale.
  DEVICE_MEMBER float score(i32 sum, int r, float key, float softcap) const {
    const float x = fma_rn(as_float((u32)sum), key, -MAGIC_FLOAT * key);
    if (!SOFTCAP) return x;
    const float by = factor[r] * cap_factor(softcap);
    return soft_cap(SCORE_SHIFT ? fma_rn(x, by, shift[r]) : x * by, softcap);
  }
};

// Sums of half a tile, replaced by scores, to weights in operand order (tiles.cuh), for rows of BLOCKS blocks.
template <int BLOCKS> struct HalfTile {
  i32 s[BLOCKS][SCORES];
  u32 p[BLOCKS][WORDS];
  float most[BLOCKS][2];  // what exponents of a row's weights are relative to: its largest score; 0 if it sees none
  float scale[BLOCKS][2];  // of its weights, relative to row_max

  // s = Q K^T. 16 tokens after 16 tokens: those that are finished do not wait for the others.
  DEVICE_MEMBER void multiply_scores(const Queries<BLOCKS>& queries, u32 keys) {
    u32 q[K_STEPS][BLOCKS][4];
    UNROLL_FOR (int k = 0; k < K_STEPS; k++)
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) queries.get(k, b, q[k][b]);
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int i = 0; i < SCORES; i++) s[b][i] = MAGIC_BITS;
    UNROLL_FOR (int n = 0; n < SCORES / 8; n++)
      UNROLL_FOR (int k = 0; k < K_STEPS; k++) {
        u32 key[4];
        ldmatrix_x4(key, (keys ^ k % 4 * 32) + k / 4 * HALF_TILE + n * 2048);
        UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
          const u32(&a)[4] = q[k][b];
          mma_s8_s8(s[b] + 8 * n, a[0], a[1], a[2], a[3], key[0], key[1]);
          mma_s8_s8(s[b] + 8 * n + 4, a[0], a[1], a[2], a[3], key[2], key[3]);
        }
      }
  }

  DEVICE_MEMBER void find_scores(const Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t, float softcap) {
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++)
        UNROLL_FOR (int k = 0; k < 8; k++) {
          i32& x = s[b][8 * j + k];
          x = (i32)as_bits(softmax[b].score(x, k / 2 % 2, of.key[2 * (k / 4) + k % 2], softcap));
        }
    }
  }

  // Scores of tokens, from `first` on, that their rows do not see.
  DEVICE_MEMBER void hide(const Visible (&visible)[ROW_BLOCKS], int first, int t) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int i = 0; i < SCORES; i++)
        if (visible[b].hides(first, i, t)) s[b][i] = (i32)as_bits(MINUS_INFINITY);
  }

  // The largest scores of the lane.
  DEVICE_MEMBER void find_most(const Softmax (&softmax)[ROW_BLOCKS]) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int r = 0; r < 2; r++) {
        most[b][r] = MINUS_INFINITY;
        UNROLL_FOR (int i = 0; i < SCORES; i += 4)
          UNROLL_FOR (int k = 0; k < 2; k++) most[b][r] = max_f32(most[b][r], as_float((u32)s[b][i + 2 * r + k]));
        if (!SOFTCAP) most[b][r] *= softmax[b].factor[r];
      }
  }
  // UNEVEN: of scores and their values' scales.
  DEVICE_MEMBER void find_most_weight(const Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) most[b][0] = most[b][1] = MINUS_INFINITY;
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      float logs[4];
      UNROLL_FOR (int k = 0; k < 4; k++) logs[k] = max_f32(log2_approx(of.value[k] * (1.0f / 255.0f)), LEAST_LOG);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++)
        UNROLL_FOR (int k = 0; k < 8; k++) {
          const int r = k / 2 % 2;
          const float by = SOFTCAP ? 1.0f : softmax[b].factor[r];
          most[b][r] = max_f32(most[b][r], fma_rn(as_float((u32)s[b][8 * j + k]), by, logs[2 * (k / 4) + k % 2]));
        }
    }
  }

  // Returns whether some row of block b is too far above its reference, which then moves: the output so far is to be
  // multiplied by `rescale`.
  DEVICE_MEMBER bool follow(Softmax& softmax, int b, float (&rescale)[2]) {
    bool behind = false;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      const float top = quad_max(most[b][r]), before = softmax.row_max[r];
      // Two units in the last place up, so that rounding makes no weight larger than a byte.
      const float m = fma_rn(as_float(as_bits(top) & 0x7FFFFFFF), 0x1p-22f, top);
      const bool sees = top > MINUS_INFINITY, raise = sees && !(m <= before + MOST_ABOVE);
      most[b][r] = sees ? m : 0.0f;
      softmax.row_max[r] = raise ? m : before;
      scale[b][r] = sees ? exp2_approx(m - softmax.row_max[r]) : 0.0f;
      rescale[r] = raise ? exp2_approx(before - m) : 1.0f;
      behind = behind || (raise && before > MINUS_INFINITY);  // before the first score there is nothing to rescale
    }
    return warp_any(behind);
  }

  DEVICE_MEMBER void weigh(Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t) {
    float sums[BLOCKS][2] = {};
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        u32 w[8];
        UNROLL_FOR (int k = 0; k < 8; k++) {
          const int i = 8 * j + k, r = k / 2 % 2;
          const float x = as_float((u32)s[b][i]);
          const float p = exp2_approx(SOFTCAP ? x - most[b][r] : fma_rn(x, softmax[b].factor[r], -most[b][r]));
          sums[b][r] += p;
          w[k] = as_bits(fma_rn(p, of.value[2 * (k / 4) + k % 2], BYTE_MAGIC));
        }
        UNROLL_FOR (int r = 0; r < 2; r++)
          p[b][2 * j + r] =
              prmt(prmt(w[2 * r], w[2 * r + 1], 0x0040), prmt(w[4 + 2 * r], w[5 + 2 * r], 0x0040), 0x5410);
      }
    }
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int r = 0; r < 2; r++) softmax[b].row_sum[r] = fma_rn(sums[b][r], scale[b][r], softmax[b].row_sum[r]);
  }

  // o += P V, where values have the factor `unit`.
  DEVICE_MEMBER void multiply_output(float (&o)[ROW_BLOCKS][OUTPUTS], u32 values, float unit) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) scale[b][0] *= unit, scale[b][1] *= unit;
    UNROLL_FOR (int n = 0; n < D / 16; n++) {
      if (n % 8 == 0) stay(!(scale[0][0] < 0.0f));  // products of more columns at a time would take too many registers
      i32 sums[BLOCKS][8];
      UNROLL_FOR (int b = 0; b < BLOCKS; b++)
        UNROLL_FOR (int i = 0; i < 8; i++) sums[b][i] = MAGIC_BITS;
      UNROLL_FOR (int k = 0; k < TOKENS / 32; k++) {
        u32 value[4];
        ldmatrix_x4(value, (values ^ k * 32) + n * 2048);
        UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
          const u32* a = p[b] + 4 * k;
          mma_u8_s8(sums[b], a[0], a[1], a[2], a[3], value[0], value[1]);
          mma_u8_s8(sums[b] + 4, a[0], a[1], a[2], a[3], value[2], value[3]);
        }
      }
      UNROLL_FOR (int b = 0; b < BLOCKS; b++)
        UNROLL_FOR (int i = 0; i < 8; i++)
          o[b][8 * n + i] = fma_rn(as_float((u32)sums[b][i]) - MAGIC_FLOAT, scale[b][i / 2 % 2], o[b][8 * n + i]);
    }
  }
};

static_assert(THREADS == 128 || THREADS == 256, "threads copy alike");
// A thread's part of half a tile, from and to the same place of a tile: 16 bytes at a time, BY bytes apart.
template <int BYTES, int BY, int AT = 0> DEVICE void copy_units(u32 to, const u8* from) {
  if constexpr (AT < BYTES) {
    cp_async_16_behind<AT>(to, from);
    copy_units<BYTES, BY, AT + BY>(to, from);
  }
}
// 64 bytes of each of ROWS_OF rows of 128.
template <int ROWS_OF> DEVICE void copy_half_rows(u32 to, const u8* from, int half) {
  const int i = thread_index(), first = i / 4 * 128 + (half ^ (i / 16 & 1)) * 64 + i % 4 * 16;
  copy_units<128 * ROWS_OF, 32 * THREADS>(to + first, from + first);
}
DEVICE void copy_half(u32 keys, const u8* from_keys, u32 values, const u8* from_values, int half) {
  if constexpr (D == 64) copy_half_rows<TOKENS>(keys, from_keys, half);
  else
    UNROLL_FOR (int part = 0; part < D / 128; part++) {
      const int first = part * HALF_TILE + half * 128 * TOKENS + 16 * thread_index();
      copy_units<128 * TOKENS, 16 * THREADS>(keys + first, from_keys + first);
    }
  if constexpr (STEP == 128) {
    copy_half_rows<D>(values, from_values, half);
  } else {
    const int first = half * 128 * D + 16 * thread_index();
    copy_units<128 * D, 16 * THREADS>(values + first, from_values + first);
  }
  const int i = thread_index(), number = token_number_at(i / (TOKENS / 4), half * TOKENS + i % (TOKENS / 4) * 4);
  if (i < TOKENS / 2) cp_async_16_behind<0>(keys + number, from_keys + number);
}

template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings,
    const Visible (&visible)[ROW_BLOCKS], u32 operand, Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS],
    int, int lane) {
  const i64 row = tiles_of(args, w);
  const Queries<BLOCKS> queries(operand, lane);
  const u32 keys = by_rows(shared_address(rings.keys), lane), values = by_rows(shared_address(rings.values), lane);
  // Not 0: times minus infinity it is that.
  UNROLL_FOR (int b = 0; b < BLOCKS; b++)
    UNROLL_FOR (int r = 0; r < 2; r++) softmax[b].factor[r] = max_f32(softmax[b].factor[r], 1e-37f);
  float next_unit;
  auto copy = [&](int i) {  // half i % 2 of tile i / 2
    const i64 tile = row + tile_at(w, i / 2);
    copy_half(shared_address(rings.keys), args.keys + tile * KEYS_BYTES, shared_address(rings.values),
        args.values + tile * VALUES_BYTES, i % 2);
    cp_async_commit();
    next_unit = args.tile_scales[tile].value;
  };
  if (HELD_QUERIES) sync_threads();  // tiles take the queries' place
  copy(0);
  const int halves = 2 * w.count;
  float unit, rescale[BLOCKS][2];
  bool again = false, behind = true;
  // Rescaling the output is rare. Outside of the loop over tiles, it does not get in the way of its registers.
  for (int i = 0; behind;) {
    for (behind = false; i < halves; i++) {
      const int half = i % 2, first = tile_at(w, i / 2) * STEP + half * TOKENS;
      if (!again) {
        unit = next_unit;
        cp_async_wait<0>();
        sync_threads();  // this half is there, and nobody needs the other
        if (i + 1 < halves) copy(i + 1);
      }
      again = false;
      if (first >= w.end) continue;
      const u8* numbers = rings.keys + half * TOKENS * 4;
      HalfTile<BLOCKS> tokens;
      tokens.multiply_scores(queries, D == 64 ? keys ^ half * 64 : keys + half * 128 * TOKENS);
      tokens.find_scores(softmax, numbers, lane & 3, args.softcap);
      if (first + TOKENS > w.clear_end || (WINDOW && first < w.clear_begin)) tokens.hide(visible, first, lane & 3);
      if (unit < 0.0f) tokens.find_most_weight(softmax, numbers, lane & 3);
      else tokens.find_most(softmax);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) behind |= tokens.follow(softmax[b], b, rescale[b]);
      if (behind) break;
      tokens.weigh(softmax, numbers, lane & 3);
      tokens.multiply_output(o, STEP == 128 ? values ^ half * 64 : values + half * 128 * D, unit < 0.0f ? -unit : unit);
    }
    again = behind;
    UNROLL_FOR (int b = 0; behind && b < BLOCKS; b++) {
      UNROLL_FOR (int r = 0; r < 2; r++) softmax[b].row_sum[r] *= rescale[b][r];
      UNROLL_FOR (int n = 0; n < OUTPUTS; n++) o[b][n] *= rescale[b][n / 2 % 2];
    }
  }
}
