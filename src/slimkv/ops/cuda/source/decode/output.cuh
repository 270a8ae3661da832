// Finishes a row of the output: adds the sink, divides, rotates back and writes.
#pragma once
#include "common/rotation.cuh"
#include "decode/schedule.cuh"

constexpr int VN = (VD + 31) / 32;
// Thread blocks that process all keys of a work tile write its output themselves, with as many warps as scratch allows.
constexpr int WRITERS = OUTPUT_TAKES_SCRATCH && OUTPUT_SCRATCH_ROWS < WARPS ? OUTPUT_SCRATCH_ROWS : WARPS;
constexpr bool WHOLE_TILES = !OUTPUT_TAKES_SCRATCH || VD <= 2 * KD;
static_assert(!WHOLE_TILES || WRITERS > 0, "queries are two bytes a number, of four columns");
DEVICE float* scratch_of_writer(u8* shared, int warp) { return (float*)(shared + OUTPUT_SCRATCH_AT) + warp * VD; }
DEVICE bool is_whole(const DecodeArgs& args, const DecodeRange& range) {
  return WHOLE_TILES && range.first == 0 && range.last == range.s.kv_blocks && (!SPLITS || range.s.kv_blocks <= 1);
}

// The merged state of a row's partial results.
struct MergedState {
  float highest, row_sum, x[VN];
  DEVICE_MEMBER void clear() {
    highest = MINUS_INFINITY, row_sum = 0;
    UNROLL_FOR (int i = 0; i < VN; i++) x[i] = 0;
  }
  // The factor that rescales a result with maximum m and sum l to maximum `to`: 0 without keys, unless the sum is NaN.
  DEVICE_MEMBER static float factor(float m, float l, float to) {
    return m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_approx(m - to);
  }

  // Adds N partial results. Their common maximum comes first, so that the exponentials are independent.
  template <int N> DEVICE_MEMBER void add(const float (&m)[N], const float (&l)[N], const float (&v)[N][VN]) {
    float row_max = highest;
    UNROLL_FOR (int j = 0; j < N; j++) row_max = max_f32(row_max, m[j]);
    const float mine = factor(highest, row_sum, row_max);
    row_sum = mul_rn(row_sum, mine);
    UNROLL_FOR (int i = 0; i < VN; i++) x[i] = mul_rn(x[i], mine);
    UNROLL_FOR (int j = 0; j < N; j++) {
      const float other = factor(m[j], l[j], row_max);
      row_sum = fma_rn(l[j], other, row_sum);
      UNROLL_FOR (int i = 0; i < VN; i++) x[i] = fma_rn(v[j][i], other, x[i]);
    }
    highest = row_max;
  }
};

// One warp. sums[i] is dimension lane + 32 i, relative to the maximum `highest` (base 2). scratch: VD floats of this
// warp.
DEVICE void write_row(const DecodeArgs& args, int row, int head, float highest, float row_sum, const float (&sums)[VN],
    float* scratch, int lane) {
  float factor = 1.0f;
  if (args.sinks) factor = add_sink(args.sinks[(i64)row * args.sink_stride + head], highest, row_sum);
  const float inverse = row_sum == 0 ? 0.0f : factor / row_sum;
  float x[VN];
  UNROLL_FOR (int i = 0; i < VN; i++) x[i] = mul_rn(sums[i], inverse);
  if (V_ROTATED)
    rotate<VD, V_ROTATED ? V_CORE : 1, true>(x, args.value_sign_bits, args.value_core, (const u16*)args.value_signs,
        args.value_norm, scratch, lane);
  const i64 at = (i64)row * args.out_stride + (i64)head * args.out_head_stride;
  UNROLL_FOR (int i = 0; i < VN; i++) {
    const int d = lane + 32 * i;
    if (d >= VD) continue;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at + d] = x[i];
    else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]));
  }
  if (args.lse && lane == 0)
    args.lse[(i64)row * args.num_kv_heads * args.group_size + head] = log_sum_exp(highest, row_sum);
}
