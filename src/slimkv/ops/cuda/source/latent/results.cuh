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
// The normalising factor of a row's sums; and storing its log-sum-exp.
DEVICE float normaliser(float row_sum) { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }
DEVICE void store_lse(const LatentArgs& args, const WorkTile& tile, int n, float row_max, float row_sum) {
  if (args.lse)
    args.lse[(i64)tile.start * args.num_heads + tile.first_row + n] =
        row_sum == 0.0f ? MINUS_INFINITY : (row_max + log2_approx(row_sum)) * LN2;
}

struct Results {
  const LatentArgs& args;
  const WorkTile& tile;
  const i64 part;
  const bool whole;

  DEVICE_MEMBER Results(const LatentArgs& args_, const WorkRange& range, const WorkTile& tile_)
      : args(args_), tile(tile_), part((i64)part_of(range) * ROWS),
        whole(args.direct && range.first == 0 && range.last >= range.s.kv_blocks) {}
  DEVICE_MEMBER float factor(float row_sum) const { return whole ? normaliser(row_sum) : 1.0f; }
  DEVICE_MEMBER void put_state(int n, float row_max, float row_sum) const {
    if (whole) store_lse(args, tile, n, row_max, row_sum);
    else args.states[2 * (part + n)] = row_max, args.states[2 * (part + n) + 1] = row_sum;
  }
  // The offset of row n; storing one number of a row, or N = 2 or 4 adjacent ones, already multiplied by its factor.
  DEVICE_MEMBER i64 row(int n) const {
    return whole ? ((i64)tile.start * args.num_heads + tile.first_row + n) * args.out_head_stride : (part + n) * LD;
  }
  template <bool WHOLE> DEVICE_MEMBER void put(i64 at, float x) const {
    if (WHOLE) store_output(args, at, x);
    else args.parts[at] = x;
  }
  template <bool WHOLE, int N> DEVICE_MEMBER void put_all(i64 at, const float (&x)[N]) const {
    if constexpr (WHOLE && OUT_TYPE != FLOAT32) {
      auto pair = [&](int i) {
        return OUT_TYPE == BFLOAT16 ? pack_bf16x2(x[i], x[i + 1]) : pack_f16x2(x[i], x[i + 1]);
      };
      if constexpr (N == 4) *(Words2*)((u16*)args.out + at) = {pair(0), pair(2)};
      else *(u32*)((u16*)args.out + at) = pair(0);
    } else {
      float* const to = (WHOLE ? (float*)args.out : args.parts) + at;
      if constexpr (N == 4) *(Words4*)to = {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])};
      else *(Words2*)to = {as_bits(x[0]), as_bits(x[1])};
    }
  }
};
