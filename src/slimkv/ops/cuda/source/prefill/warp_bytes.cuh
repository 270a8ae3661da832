// Integer mma.sync (INTEGERS), for devices without wgmma: int8 scores, probabilities as unsigned bytes, and the loop
// over the tiles of a thread block, half a tile at a time. Shared memory has one tile of keys and one of values; all
// threads copy one half while the other is attended.
//
// Probabilities of half a tile are relative to the row's largest score there, so that every half uses all 8 bits.
// UNEVEN: relative to the largest score plus the logarithm of the value's scale, so that a token with a small value
// does not use up the bits. Integer products of half a tile are added to the output in fp32.
#pragma once
#include "prefill/warp_operands.cuh"

// Integer sums below 2^22 that start here are the bits of the float MAGIC_FLOAT + sum, without conversion.
constexpr i32 MAGIC_BITS = 0x4B400000;
constexpr u32 BYTE_MAGIC = 0x64006400;  // 1024 as halves: plus a number below 256, the low byte is its nearest integer
constexpr u32 ONES = 0x3C003C00;  // 1 as halves
// In powers of two: how far scores may exceed the maximum that the output is relative to.
constexpr float MOST_ABOVE = 32.0f;
constexpr float LOWEST = -1e30f;  // the maximum of a row without visible tokens
constexpr float LEAST_LOG = -15.0f;  // bound on a value's log2 scale, so that probabilities fit halves

typedef RowState Softmax;  // row_max: the earlier maximum that output and sums are relative to

// Half a tile for BLOCKS row blocks: products and then scores, and probabilities in operand order (tiles.cuh).
template <int BLOCKS> struct HalfTile {
  i32 s[BLOCKS][SCORES];
  u32 p[BLOCKS][WORDS];
  float most[BLOCKS][2];  // a row's largest score, to which its exponents are relative
  float scale[BLOCKS][2];  // the unit of its probabilities, relative to row_max

  // s = Q K^T, 16 tokens at a time, so that finished scores need not wait for the rest. At head size 256, 32 dimensions
  // at a time, because the queries of all dimensions would take too many registers.
  DEVICE_MEMBER void multiply_scores(const Queries<BLOCKS>& queries, u32 keys) {
    constexpr int GROUPS = SCORES / 8;
    u32 q[K_STEPS][BLOCKS][4];
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int i = 0; i < SCORES; i++) s[b][i] = MAGIC_BITS;
    UNROLL_FOR (int i = 0; i < GROUPS * K_STEPS; i++) {
      const int k = D > 128 ? i / GROUPS : i % K_STEPS, n = D > 128 ? i % GROUPS : i / K_STEPS;
      UNROLL_FOR (int b = 0; n == 0 && b < BLOCKS; b++) queries.get(k, b, q[k][b]);
      u32 key[4];
      ldmatrix_x4(key, (keys ^ k % 4 * 32) + k / 4 * HALF_TILE + n * 2048);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        const u32(&a)[4] = q[k][b];
        mma_s8_s8(s[b] + 8 * n, a[0], a[1], a[2], a[3], key[0], key[1]);
        mma_s8_s8(s[b] + 8 * n + 4, a[0], a[1], a[2], a[3], key[2], key[3]);
      }
    }
  }

  // Turns products into scores, without `factor` or, with SOFTCAP, capped.
  DEVICE_MEMBER void find_scores(const Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t, float softcap) {
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      UNROLL_FOR (int b = 0; b < BLOCKS; b++)
        UNROLL_FOR (int k = 0; k < 8; k++) {
          const float key = of.key[2 * (k / 4) + k % 2];
          const float x = fma_rn(as_float((u32)s[b][8 * j + k]), key, -MAGIC_FLOAT * key);
          s[b][8 * j + k] = (i32)as_bits(SOFTCAP ? softmax[b].capped(x, k / 2 % 2, 1.0f, softcap) : x);
        }
    }
  }

  // Masks scores; `first`: the first token.
  DEVICE_MEMBER void apply_mask(const Visible (&visible)[ROW_BLOCKS], int first, int t) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int i = 0; i < SCORES; i++)
        if (visible[b].masks(first, i, t)) s[b][i] = (i32)as_bits(MINUS_INFINITY);
  }

  // Finds the lane's largest scores; OF_UNEVEN: including the logarithms of the values' scales.
  template <bool OF_UNEVEN>
  DEVICE_MEMBER void find_most(const Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) most[b][0] = most[b][1] = MINUS_INFINITY;
    UNROLL_FOR (int i = 0; i < SCORES; i++) {
      const int r = i / 2 % 2, place = i / 8 * 16 + 4 * t + i / 4 % 2 * 2 + i % 2;
      float log = 0.0f;
      if (OF_UNEVEN) {
        const float scale = *(const float*)(numbers + token_number_at(VALUE_SCALE, place));
        log = max_f32(log2_approx(scale * (1.0f / 255.0f)), LEAST_LOG);
      }
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        const float x = as_float((u32)s[b][i]), by = SOFTCAP ? 1.0f : softmax[b].factor[r];
        most[b][r] = max_f32(most[b][r], OF_UNEVEN ? fma_rn(x, by, log) : x);
        if (!OF_UNEVEN && i + 4 >= SCORES && i % 2) most[b][r] *= by;
      }
    }
  }

  // Raises row_max for rows of row block b that exceed it by too much, and rescales output and sums.
  DEVICE_MEMBER void update_max(Softmax& softmax, float (&o)[OUTPUTS], int b) {
    bool behind[2];
    UNROLL_FOR (int r = 0; r < 2; r++) {
      // Two ulps up, so that rounding makes no probability larger than a byte holds.
      const float top = quad_max(most[b][r]), up = fma_rn(as_float(as_bits(top) & 0x7FFFFFFF), 0x1p-22f, top);
      most[b][r] = max_f32(up, LOWEST);
      behind[r] = most[b][r] > softmax.row_max[r] + MOST_ABOVE;
    }
    if (warp_any(behind[0] || behind[1])) {
      float by[2];
      UNROLL_FOR (int r = 0; r < 2; r++) {
        by[r] = behind[r] ? exp2_approx(softmax.row_max[r] - most[b][r]) : 1.0f;
        softmax.row_max[r] = behind[r] ? most[b][r] : softmax.row_max[r];
        softmax.row_sum[r] *= by[r];
      }
      UNROLL_FOR (int n = 0; n < OUTPUTS; n++) o[n] *= by[n / 2 % 2];
    }
    UNROLL_FOR (int r = 0; r < 2; r++) scale[b][r] = exp2_approx(most[b][r] - softmax.row_max[r]);
  }

  // Computes probabilities as halves, sums of up to eight of them, and, times the values' scales, bytes.
  DEVICE_MEMBER void weigh(Softmax (&softmax)[ROW_BLOCKS], const u8* numbers, int t) {
    u32 sums[BLOCKS][4] = {};
    UNROLL_FOR (int j = 0; j < SCORES / 8; j++) {
      const TokenScales of(numbers, 16 * j + 4 * t);
      const u32 scales[2] = {pack_f16x2(of.value[0], of.value[1]), pack_f16x2(of.value[2], of.value[3])};
      UNROLL_FOR (int b = 0; b < BLOCKS; b++) {
        u32 w[4];
        UNROLL_FOR (int i = 0; i < 4; i++) {
          float x[2];
          UNROLL_FOR (int k = 0; k < 2; k++) {
            const float score = as_float((u32)s[b][8 * j + 2 * i + k]), from = most[b][i % 2];
            x[k] = exp2_approx(SOFTCAP ? score - from : fma_rn(score, softmax[b].factor[i % 2], -from));
          }
          w[i] = pack_f16x2(x[0], x[1]);
        }
        UNROLL_FOR (int i = 0; i < 4; i++) sums[b][i] = fma_f16x2(w[i], ONES, sums[b][i]);
        UNROLL_FOR (int i = 0; i < 4; i++) w[i] = fma_f16x2(w[i], scales[i / 2], BYTE_MAGIC);
        UNROLL_FOR (int r = 0; r < 2; r++) p[b][2 * j + r] = prmt(w[r], w[2 + r], 0x6420);
      }
    }
    UNROLL_FOR (int b = 0; b < BLOCKS; b++)
      UNROLL_FOR (int r = 0; r < 2; r++)
        softmax[b].row_sum[r] =
            fma_rn(sum_of_halves(sums[b][r]) + sum_of_halves(sums[b][2 + r]), scale[b][r], softmax[b].row_sum[r]);
  }

  // o += P V; `unit`: the factor of integer products.
  DEVICE_MEMBER void multiply_output(float (&o)[ROW_BLOCKS][OUTPUTS], u32 values, float unit) {
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) scale[b][0] *= unit, scale[b][1] *= unit;
    UNROLL_FOR (int n = 0; n < D / 16; n++) {
      if (n % 8 == 0) stay(!(scale[0][0] < 0.0f));  // more columns at a time would take too many registers
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

// Copies a thread's part of half `half` of a tile: ROWS_OF rows of 128 bytes or, SIDE_BY_SIDE, 64 bytes of each row. A
// warp's part is contiguous, so that addresses differ by constants.
template <int ROWS_OF, bool SIDE_BY_SIDE> DEVICE void copy_half(u8* to, const u8* from, int half) {
  constexpr int BYTES = 128 * ROWS_OF / (THREADS / 32);
  const int lane = thread_index() & 31,
            first = thread_index() / 32 * BYTES +
      (SIDE_BY_SIDE ? lane / 4 * 128 + (half ^ lane / 16) * 64 + lane % 4 * 16 : half * 128 * ROWS_OF + lane * 16);
  UNROLL_FOR (int i = 0; i < BYTES; i += SIDE_BY_SIDE ? 1024 : 512) cp_async_16(to + first + i, from + first + i);
}

template <int BLOCKS>
DEVICE void attend_tiles(const PrefillArgs& args, const Work& w, const Rings& rings,
    const Visible (&visible)[ROW_BLOCKS], u32 operand, Softmax (&softmax)[ROW_BLOCKS], float (&o)[ROW_BLOCKS][OUTPUTS],
    int, int lane) {
  const i64 row = tiles_of(args, w);
  const Queries<BLOCKS> queries(operand, lane);
  const u32 keys = by_rows(shared_address(rings.keys), lane), values = by_rows(shared_address(rings.values), lane);
  // Not 0, because 0 times minus infinity is NaN.
  UNROLL_FOR (int b = 0; b < BLOCKS; b++)
    UNROLL_FOR (int r = 0; r < 2; r++) softmax[b].factor[r] = max_f32(softmax[b].factor[r], 1e-37f);
  auto copy = [&](int at) {
    const u8* const from = args.keys + (row + (at >> 1)) * KEYS_BYTES;
    UNROLL_FOR (int part = 0; part < (D + 127) / 128; part++)
      copy_half<TOKENS, D == 64>(rings.keys + part * HALF_TILE, from + part * HALF_TILE, at & 1);
    copy_half<D, STEP == 128>(rings.values, args.values + (row + (at >> 1)) * VALUES_BYTES, at & 1);
    const int i = thread_index(),
              number = token_number_at(i / (TOKENS / 4), ((at & 1) * TOKENS + i % (TOKENS / 4) * 4));
    if (i < TOKENS / 2) cp_async_16(rings.keys + number, from + number);
    cp_async_commit();
  };
  // Halves of tiles, from the last visible one to the first.
  const int first = shfl(2 * (w.tile - w.count + 1), 0), last = shfl(min_i32(2 * w.tile + 1, (w.end - 1) / TOKENS), 0);
  if (HELD_QUERIES) sync_threads();  // tiles overwrite the queries
  copy(last);
  for (int at = last; at >= first; at--) {
    cp_async_wait<0>();
    sync_threads();  // this half has arrived, and the other is free
    if (at > first) copy(at - 1);
    const int half = at & 1;
    const u8* numbers = rings.keys + half * TOKENS * 4;
    const float unit = as_float((u32)ldg_i32((const i32*)&args.tile_scales[row + (at >> 1)].value));
    HalfTile<BLOCKS> tokens;
    tokens.multiply_scores(queries, D == 64 ? keys ^ half * 64 : keys + half * 128 * TOKENS);
    tokens.find_scores(softmax, numbers, lane & 3, args.softcap);
    if ((at + 1) * TOKENS > w.clear_end || (WINDOW && at * TOKENS < w.clear_begin))
      tokens.apply_mask(visible, at * TOKENS, lane & 3);
    if (unit < 0.0f) tokens.template find_most<true>(softmax, numbers, lane & 3);
    else tokens.template find_most<false>(softmax, numbers, lane & 3);
    UNROLL_FOR (int b = 0; b < BLOCKS; b++) tokens.update_max(softmax[b], o[b], b);
    tokens.weigh(softmax, numbers, lane & 3);
    tokens.multiply_output(o, STEP == 128 ? values ^ half * 64 : values + half * 128 * D, unit < 0.0f ? -unit : unit);
  }
}
