// Stores the results of a range: to the output if the range is a whole work tile, otherwise as partial results.
#pragma once
#include "latent/format.cuh"
#include "latent/schedule.cuh"

DEVICE void store_output(const LatentArgs& args, i64 at, float x) {
  if (OUT_TYPE == FLOAT32) ((float*)args.out)[at] = x;
  else ((u16*)args.out)[at] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(x) : f32_to_f16(x));
}
// The offset of row n of a work tile in the output.
DEVICE i64 output_row(const LatentArgs& args, const WorkTile& tile, int n) {
  const int query = (tile.first_row + n) / args.num_heads, head = tile.first_row + n - query * args.num_heads;
  return (tile.start + query) * args.out_stride + head * args.out_head_stride;
}
// The factor that normalises a row's sums, and a function that stores the row's log-sum-exp.
DEVICE float normaliser(float row_sum) { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }
DEVICE void store_lse(const LatentArgs& args, const WorkTile& tile, int n, float row_max, float row_sum) {
  if (args.lse)
    args.lse[(i64)tile.start * args.num_heads + tile.first_row + n] =
        row_sum == 0.0f ? MINUS_INFINITY : (row_max + log2_approx(row_sum)) * LN2;
}

// Partial results are fp16: a level is less than 2^LEVEL_BITS and a probability at most 2^RESCALE_THRESHOLD, so sums
// over 2^n tokens fit after a division by 2^(n + 2). Maxima are raised and sums of probabilities divided accordingly.
// Of 16 columns, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 are stored together, as a lane has them (fragment order).
constexpr int LEVEL_BITS = 9;

struct Results {
  const LatentArgs& args;
  const WorkTile& tile;
  const i64 part;
  const bool whole;
  int lowered;  // the power of two by which partial results are divided

  DEVICE_MEMBER Results(const LatentArgs& args_, const WorkRange& range, const WorkTile& tile_)
      : args(args_), tile(tile_), part((i64)part_of(range) * ROWS),
        whole(args.direct && range.first == 0 && range.last >= range.s.kv_blocks) {
    const int tokens_exponent = (int)(as_bits((float)((range.last - range.first) * KV_BLOCK)) >> 23) - 126;
    lowered = LEVEL_BITS + (int)RESCALE_THRESHOLD - 15 + tokens_exponent;
  }
  DEVICE_MEMBER float part_factor() const { return as_float((u32)(127 - lowered) << 23); }
  DEVICE_MEMBER float factor(float row_sum) const { return whole ? normaliser(row_sum) : part_factor(); }
  DEVICE_MEMBER void put_state(int n, float row_max, float row_sum) const {
    if (whole) store_lse(args, tile, n, row_max, row_sum);
    else args.states[2 * (part + n)] = row_max + lowered, args.states[2 * (part + n) + 1] = row_sum * part_factor();
  }
  // The offset of row n. put_all stores N = 2 or 4 adjacent numbers of an output row, already multiplied by its factor.
  DEVICE_MEMBER i64 row(int n) const {
    return whole ? ((i64)tile.start * args.num_heads + tile.first_row + n) * args.out_head_stride : (part + n) * LD;
  }
  template <int N> DEVICE_MEMBER void put_all(i64 at, const float (&x)[N]) const {
    if constexpr (OUT_TYPE != FLOAT32) {
      auto pair = [&](int i) {
        return OUT_TYPE == BFLOAT16 ? pack_bf16x2(x[i], x[i + 1]) : pack_f16x2(x[i], x[i + 1]);
      };
      if constexpr (N == 4) *(Words2*)((u16*)args.out + at) = {pair(0), pair(2)};
      else *(u32*)((u16*)args.out + at) = pair(0);
    } else {
      float* const to = (float*)args.out + at;
      if constexpr (N == 4) *(Words4*)to = {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])};
      else *(Words2*)to = {as_bits(x[0]), as_bits(x[1])};
    }
  }
  // Stores columns 2 t, 2 t + 1 (`low`), 2 t + 8 and 2 t + 9 of the 16 columns of a partial result from `at` on.
  DEVICE_MEMBER void put_part(i64 at, int t, u32 low, u32 high) const {
    *(Words2*)(args.parts + at + 4 * t) = {low, high};
  }
};
