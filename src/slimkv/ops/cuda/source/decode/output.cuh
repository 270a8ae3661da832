// A row of the output: adds the sink, divides, rotates back and writes.
#pragma once
#include "common/rotation.cuh"
#include "decode/schedule.cuh"

constexpr int VN = (VD + 31) / 32;
// Blocks that have all keys of an item write its output themselves. Rotations that take shared memory have that of the queries, which nobody
// needs any more: as many warps write as rows fit. Those of pairs have their own.
constexpr int ROWS_OF_SCRATCH = ROLES ? WARPS : QUERY_BYTES / (4 * VD), WRITERS = TAKES_SCRATCH && ROWS_OF_SCRATCH < WARPS ? ROWS_OF_SCRATCH : WARPS;
constexpr bool WHOLE_ITEMS = !TAKES_SCRATCH || VD <= 2 * KD;
static_assert(!WHOLE_ITEMS || WRITERS > 0, "queries are two bytes a number, of four columns");
DEVICE float* scratch_of_writer(u8* shared, int warp) { return (float*)(shared + (ROLES ? SCRATCH_AT : QUERY_AT)) + warp * VD; }
DEVICE bool is_whole(const DecodeArgs& args, const WorkRange& range) {
  return WHOLE || WHOLE_ITEMS && args.merge_split == 1 && range.first == 0 && range.last == range.s.steps;
}

// POLLED: `merge` does not wait for all of `attend` to end where its blocks have a single range each. Every number of a part tells for
// itself whether it has been written: the bits of one that has not are those of no result.
constexpr u32 NOT_YET = 0xFFFFFFFFu;
DEVICE float written(float x) { return as_bits(x) == NOT_YET ? NOT_A_NUMBER : x; }
DEVICE void write_part(float* to, float x) {
  if (POLLED) st_relaxed(to, written(x)); else *to = x;
}
// One warp: lets `merge` start, when it can no longer see what was in a part before.
DEVICE void start_merge(const DecodeArgs& args, bool forgets, i64 part, int lane) {
  if (forgets) {
    for (int i = lane; i < COLUMNS * VD / 4; i += 32) *(Words4*)(args.parts + part * COLUMNS * VD + 4 * i) = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    for (int i = lane; i < COLUMNS; i += 32) *(Words2*)(args.part_states + 2 * (part * COLUMNS + i)) = {NOT_YET, NOT_YET};
    fence_device();
    sync_warp();
  }
  if (lane == 0) griddepcontrol_launch_dependents();
}

// Parts of a row, some at a time.
struct MergedState {
  float highest, row_sum, x[VN];
  DEVICE_MEMBER void clear() {
    highest = MINUS_INFINITY, row_sum = 0;
#pragma unroll
    for (int i = 0; i < VN; i++) x[i] = 0;
  }
  // What makes a part with maximum m and sum l relative to `to`; one without keys counts only if it is not a number.
  DEVICE_MEMBER static float factor(float m, float l, float to) { return m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_approx(m - to); }

  // The maximum of all first, so that no part waits for the exponential of another.
  template <int N> DEVICE_MEMBER void add(const float (&m)[N], const float (&l)[N], const float (&v)[N][VN]) {
    float row_max = highest;
#pragma unroll
    for (int j = 0; j < N; j++) row_max = max_f32(row_max, m[j]);
    const float mine = factor(highest, row_sum, row_max);
    row_sum *= mine;
#pragma unroll
    for (int i = 0; i < VN; i++) x[i] *= mine;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float other = factor(m[j], l[j], row_max);
      row_sum += l[j] * other;
#pragma unroll
      for (int i = 0; i < VN; i++) x[i] += v[j][i] * other;
    }
    highest = row_max;
  }
  // The same of N parts whose maxima and sums the lanes have, part lane % N.
  template <int N> DEVICE_MEMBER void add_spread(float m, float l, const float (&v)[N][VN]) {
    float row_max = m;
#pragma unroll
    for (int d = 1; d < N; d <<= 1) row_max = max_f32(row_max, shfl_xor(row_max, d));
    row_max = max_f32(row_max, highest);
    const float mine = factor(highest, row_sum, row_max), other = factor(m, l, row_max);
    float sum = l * other;
#pragma unroll
    for (int d = 1; d < N; d <<= 1) sum += shfl_xor(sum, d);
    row_sum = row_sum * mine + sum;
#pragma unroll
    for (int i = 0; i < VN; i++) x[i] *= mine;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float by = shfl(other, j);
#pragma unroll
      for (int i = 0; i < VN; i++) x[i] += v[j][i] * by;
    }
    highest = row_max;
  }
};

// One warp; x: dimensions lane + 32 i of the sum, relative to `highest`, a power of two. scratch: VD floats of the warp's own.
DEVICE void write_row(const DecodeArgs& args, int row, int head, float highest, float row_sum, const float (&sums)[VN], float* scratch,
                      int lane) {
  float factor = 1.0f;
  if (args.sinks) {
    const float sink = args.sinks[head] * LOG2E, above = max_f32(highest, sink);
    factor = highest == MINUS_INFINITY ? 0.0f : exp2_approx(highest - above);
    row_sum = row_sum * (row_sum == row_sum ? factor : 1.0f) + exp2_approx(sink - above);
    highest = above;
  }
  const float inverse = row_sum == 0 ? 0.0f : factor / row_sum;
  float x[VN];
#pragma unroll
  for (int i = 0; i < VN; i++) x[i] = sums[i] * inverse;
  if (V_ROTATED) unrotate<VD, V_CORE>(x, args.value_sign_bits, args.value_core, (const u16*)args.value_signs, args.value_norm, scratch, lane);
  const i64 at = (i64)row * args.out_stride + (i64)head * args.out_head_stride;
#pragma unroll
  for (int i = 0; i < VN; i++) {
    const int d = lane + 32 * i;
    if (d >= VD) continue;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at + d] = x[i];
    else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]));
  }
  if (args.lse && lane == 0)
    args.lse[(i64)row * args.num_kv_heads * args.group_size + head] =
        row_sum == 0 ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
}
