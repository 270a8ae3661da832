// Puts together what few.cu made of the parts of contexts. A block has the rows of one of its blocks, a warp a row at a time.
#include "prefill/work.cuh"

// Two numbers of a row.
DEVICE void store_pair(const PrefillArgs& args, i64 at, float a, float b) {
  if (OUT_TYPE == FLOAT32) {
    ((float*)args.out)[at] = a, ((float*)args.out)[at + 1] = b;
    return;
  }
  const u32 word = OUT_TYPE == FLOAT16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
  ((u16*)args.out)[at] = (u16)word, ((u16*)args.out)[at + 1] = (u16)(word >> 16);
}

KERNEL(THREADS, 1) merge(GRID_CONSTANT PrefillArgs args) {
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31,
            heads = args.num_kv_heads * args.group_size;
  pdl_wait();
  Work w;
  if (!find_work(args, lane, w)) return;
  for (int i = warp; i < ROWS; i += THREADS / 32) {
    const Row row = row_of(args, w, 0, i);
    if (!row.valid) continue;
    const i64 of_row = row.query * heads + row.head, parts = (i64)args.total * heads;
    const float sink = args.sinks ? args.sinks[row.query * args.sink_stride + row.head] * LOG2E : MINUS_INFINITY;
    float most = sink;
    for (int p = 0; p < args.splits; p++) most = max_f32(most, args.part_lse[p * parts + of_row]);
    float x[D / 32] = {}, sum = sink == MINUS_INFINITY ? 0.0f : exp2_approx(sink - most);
    for (int p = 0; p < args.splits; p++) {
      const float lse = args.part_lse[p * parts + of_row];
      if (lse == MINUS_INFINITY) continue;  // it has seen nothing
      const float by = exp2_approx(lse - most);
      sum += by;
#pragma unroll
      for (int k = 0; k < D / 32; k++) x[k] += by * args.state[(p * parts + of_row) * D + D / 32 * lane + k];
    }
    const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int k = 0; k < D / 32; k += 2)
      store_pair(args, row.query * args.out_stride + row.head * args.out_head_stride + D / 32 * lane + k, x[k] * by,
          x[k + 1] * by);
    if (args.lse && lane == 0) args.lse[of_row] = sum == 0.0f ? MINUS_INFINITY : (most + log2_approx(sum)) * LN2;
  }
}
HOST_TESTABLE(merge, PrefillArgs)
