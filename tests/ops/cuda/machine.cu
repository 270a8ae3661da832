// One small kernel per feature that host.h emulates; see test_host.py.
#include "common/intrinsics.cuh"

struct Args {
  const u32* in;
  u32* out;
  i32 mode, n;
};

KERNEL(32, 1) shuffles(GRID_CONSTANT Args args) {
  int lane = thread_index();
  u32* out = args.out + 32 * 4 * block_index();
  u32 x = args.in[lane];
  out[lane] = shfl_xor(x, 5);
  out[32 + lane] = shfl(x, (lane + 7) & 31);
  out[64 + lane] = (u32)shfl_xor((i64)x << 20, 16) >> 20;
  out[96 + lane] = warp_any(x == args.in[9]) ? 1 : 0;
}
HOST_TESTABLE(shuffles, Args)

// in: [32][10] words a0..a3, b0, b1, c0..c3 per lane.
KERNEL(32, 1) products(GRID_CONSTANT Args args) {
  int lane = thread_index();
  const u32* x = args.in + 10 * lane;
  i32 c[4];
  float f[4];
  for (int i = 0; i < 4; i++) c[i] = (i32)x[6 + i], f[i] = as_float(x[6 + i]);
  if (args.mode == 0) mma_u8_s8(c, x[0], x[1], x[2], x[3], x[4], x[5]);
  if (args.mode == 1) mma_s8_u8(c, x[0], x[1], x[2], x[3], x[4], x[5]);
  if (args.mode == 2) mma_s8_s8(c, x[0], x[1], x[2], x[3], x[4], x[5]);
  if (args.mode == 3) mma_f16(f, x[0], x[1], x[2], x[3], x[4], x[5]);
  if (args.mode == 4) mma_bf16(f, x[0], x[1], x[2], x[3], x[4], x[5]);
  for (int i = 0; i < 4; i++) args.out[4 * lane + i] = args.mode >= 3 ? as_bits(f[i]) : (u32)c[i];
}
HOST_TESTABLE(products, Args)

KERNEL(32, 1) transpose(GRID_CONSTANT Args args) {
  args.out[thread_index()] = movmatrix_trans(args.in[thread_index()]);
}
HOST_TESTABLE(transpose, Args)

// in: triples a, b, selector.
KERNEL(64, 1) permute(GRID_CONSTANT Args args) {
  for (int i = thread_index(); i < args.n; i += 64)
    args.out[i] = prmt(args.in[3 * i], args.in[3 * i + 1], args.in[3 * i + 2]);
}
HOST_TESTABLE(permute, Args)

KERNEL(64, 1) conversions(GRID_CONSTANT Args args) {
  for (int i = thread_index(); i < args.n; i += 64) {
    float x = as_float(args.in[i]);
    u32 half = f32_to_f16(x);
    args.out[4 * i] = half;
    args.out[4 * i + 1] = as_bits(f16_to_f32(half));
    args.out[4 * i + 2] = f32_to_bf16(x);
    args.out[4 * i + 3] = pack_f16x2(x, -x);
  }
}
HOST_TESTABLE(conversions, Args)

// in: words a, b of two 16-bit floats each.
KERNEL(64, 1) pairs(GRID_CONSTANT Args args) {
  for (int i = thread_index(); i < args.n; i += 64) {
    u32 a = args.in[2 * i], b = args.in[2 * i + 1];
    args.out[4 * i] = mul_f16x2(a, b);
    args.out[4 * i + 1] = mul_bf16x2(a, b);
    args.out[4 * i + 2] = max_abs_f16x2(a, b) & 0x7FFF7FFFu;  // any signs
    args.out[4 * i + 3] = max_abs_bf16x2(a, b) & 0x7FFF7FFFu;
  }
}
HOST_TESTABLE(pairs, Args)

// in: a, b; out: their product in units of the smallest float, rounded up, plus mode.
KERNEL(64, 1) cells(GRID_CONSTANT Args args) {
  for (int i = thread_index(); i < args.n; i += 64)
    args.out[i] = ceil_product(as_float(args.in[2 * i]), as_float(args.in[2 * i + 1]), args.mode);
}
HOST_TESTABLE(cells, Args)

// mode: the thread that exits without waiting; negative: none.
KERNEL(64, 1) waiting(GRID_CONSTANT Args args) {
  if (thread_index() == args.mode) return;
  griddepcontrol_wait();
}
HOST_TESTABLE(waiting, Args)

// Reverses 4 words per thread through shared memory, with asynchronous copies.
KERNEL(128, 1) through_shared(GRID_CONSTANT Args args) {
  SHARED_MEMORY(memory);
  u32* words = (u32*)memory;
  int t = thread_index();
  cp_async_16(words + 4 * t, args.in + 4 * t);
  cp_async_commit();
  if (args.mode != 1) cp_async_wait<0>();
  if (args.mode != 2) sync_threads();
  for (int i = 0; i < 4; i++) args.out[512 * block_index() + 4 * t + i] = words[511 - (4 * t + i)];
  if (args.mode == 3 && t == 0) words[args.n] = 0;
}
HOST_TESTABLE(through_shared, Args)

KERNEL(64, 1) divergent(GRID_CONSTANT Args args) {
  int t = thread_index();
  if (args.mode == 0 && t == 40) return;
  if (args.mode == 1 && t == 40) sync_threads();
  if (args.mode == 2 && t == 40) shfl(1u, 0);
  args.out[t] = shfl_xor((u32)t, 1);
}
HOST_TESTABLE(divergent, Args)

// Warp 1 reads what warp 0 overwrites after `n` shuffles; a barrier between is missing.
KERNEL(64, 1) unordered(GRID_CONSTANT Args args) {
  SHARED_MEMORY(memory);
  u32* words = (u32*)memory;
  const int t = thread_index(), lane = t & 31;
  if (t >= 32) words[lane] = args.in[lane];
  sync_threads();
  if (t < 32) {
    for (int i = 0; i < args.n; i++) shfl(1u, 0);
    words[lane] = 0;
  } else {
    shfl(1u, 0);
    args.out[lane] = words[lane];
  }
}
HOST_TESTABLE(unordered, Args)
