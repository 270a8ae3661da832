// The instructions that the kernels use, by name. Kernels contain no assembly of their own: what is in this file is all
// that another machine has to provide, and the tests provide it on a CPU (tests/ops/cuda/host.h), where every lane is a
// coroutine. No header of the CUDA toolkit is needed, so that NVRTC alone can compile this.
#pragma once
#ifdef SLIMKV_HOST
#include "host.h"
#else

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
static_assert(sizeof(i64) == 8 && sizeof(u64) == 8, "64-bit integers");

#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE static __device__ __forceinline__
#define UNROLL_FOR(...) _Pragma("unroll") for (__VA_ARGS__)
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define SHARED_MEMORY(name) extern __shared__ __align__(16) u8 name[]
#define SHARED_OPERANDS(name) \
  extern __shared__ __align__(1024) u8 name[]  // on the boundary of exchanged rows (hopper.cuh)
#define GRID_CONSTANT const __grid_constant__
#define HOST_TESTABLE(name, Args)  // what the tests launch

struct __align__(8) Words2 { u32 x, y; };
struct __align__(16) Words4 { u32 x, y, z, w; };

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_index_y() { return blockIdx.y; }
DEVICE int block_count() { return gridDim.x; }
DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// The same for some warps of a block, which are `threads` and use a number of their own, from 1 on.
DEVICE void sync_team(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE bool team_any(bool p, int number, int threads) {
  u32 r;
  asm volatile("{.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;}"
      : "=r"(r)
      : "r"((u32)p), "r"(number), "r"(threads)
      : "memory");
  return r;
}

DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }

// Functions that are one instruction of two or three words, or of one float.
#define SLIMKV_OF_2(name, instruction) \
  DEVICE u32 name(u32 a, u32 b) { \
    u32 r; \
    asm(instruction " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); \
    return r; \
  }
#define SLIMKV_OF_3(name, T, instruction) \
  DEVICE T name(u32 a, u32 b, T c) { \
    T r; \
    asm(instruction " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); \
    return r; \
  }
#define SLIMKV_OF_FLOAT(name, instruction) \
  DEVICE float name(float x) { \
    float r; \
    asm(instruction " %0, %1;" : "=f"(r) : "f"(x)); \
    return r; \
  }

// Byte i of the result is byte s_i of (a, b), s the third operand; with bit 3 of s_i set, the sign of that byte eight
// times.
SLIMKV_OF_3(prmt, u32, "prmt.b32")
// The bits of a where the mask is one, those of b elsewhere: one instruction, which compilers do not find for a
// constant mask.
DEVICE u32 bit_select(u32 mask, u32 a, u32 b) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

// Fast ones, accurate to a few units in the last place.
SLIMKV_OF_FLOAT(exp2_approx, "ex2.approx.ftz.f32")
SLIMKV_OF_FLOAT(log2_approx, "lg2.approx.ftz.f32")
SLIMKV_OF_FLOAT(rcp_approx, "rcp.approx.ftz.f32")
SLIMKV_OF_FLOAT(rsqrt_approx, "rsqrt.approx.ftz.f32")
DEVICE float tanh_of(float x) { return tanhf(x); }

// Single IEEE operations, never contracted.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
// The same without branches, for normal numbers whose quotient and remainders are normal: correctly rounded as well.
DEVICE float div_rn_normal(float a, float b) {
  float r = rcp_approx(b);
  r = __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
  float q = __fmul_rn(a, r);
  q = __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
  return __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
}
DEVICE float sqrt_rn_normal(float x) {
  const float r = rsqrt_approx(x);
  float s = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-s, s, x), __fmul_rn(r, 0.5f), s);
}
DEVICE float i32_to_f32_rn(i32 x) { return __int2float_rn(x); }
DEVICE float i64_to_f32_rn(i64 x) { return __ll2float_rn(x); }
DEVICE i32 f32_to_i32_rz(float x) { return __float2int_rz(x); }
// The smallest integer not below a * b * 2^149, plus `zero` (which makes it positive), from the unrounded product: it
// computes on denormal numbers, whose bits are integers.
DEVICE u32 ceil_product(float a, float b, int zero) {
  float r;
  asm("fma.rp.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(__uint_as_float(zero)));
  return __float_as_uint(r);
}
// The same, at least 0.
DEVICE u32 ceil_product_or_zero(float a, float b, int zero) {
  float r;
  asm("fma.rp.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(__uint_as_float(zero)));
  return __float_as_uint(r);
}
DEVICE float floor_of(float x) { return floorf(x); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE int min_i32(int a, int b) { return min(a, b); }
DEVICE int max_i32(int a, int b) { return max(a, b); }
DEVICE u32 max_u32(u32 a, u32 b) { return max(a, b); }

// 16-bit floats as bits.
DEVICE float f16_to_f32(u32 bits) {
  float r;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(bits));
  return r;
}
DEVICE u32 f32_to_f16(float x) {
  u32 r;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
  return r;
}
DEVICE u32 pack_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// e4m3, rounded to the nearest even, at most 448: two numbers, in the low half of the word.
DEVICE u32 pack_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return 0;  // only kernels of sm_90a use it
#endif
}
// Four, the first in the lowest byte.
DEVICE u32 pack_e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, y};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
#else
  return 0;
#endif
}
// The numbers of the low half, as halves.
DEVICE u32 unpack_e4m3x2(u32 x) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(x));
  return r;
#else
  return 0;
#endif
}
DEVICE u32 f32_to_bf16(float x) {
  u32 r;
  asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
  return r;
}
DEVICE u32 pack_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Pair by pair the larger magnitude, with any sign; NaN if there is one.
#if __CUDA_ARCH__ >= 860
SLIMKV_OF_2(max_abs_f16x2, "max.NaN.xorsign.abs.f16x2")
SLIMKV_OF_2(max_abs_bf16x2, "max.NaN.xorsign.abs.bf16x2")
#else
SLIMKV_OF_2(max_f16x2, "max.NaN.f16x2")
SLIMKV_OF_2(max_bf16x2, "max.NaN.bf16x2")
DEVICE u32 max_abs_f16x2(u32 a, u32 b) { return max_f16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
DEVICE u32 max_abs_bf16x2(u32 a, u32 b) { return max_bf16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
#endif
// Pair by pair, rounded once, down to the smallest denormal numbers; the sum with -0 is the product with its sign.
SLIMKV_OF_3(fma_f16x2, u32, "fma.rn.f16x2")
SLIMKV_OF_3(fma_bf16x2, u32, "fma.rn.bf16x2")
SLIMKV_OF_2(sub_f16x2, "sub.rn.f16x2")
DEVICE u32 mul_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, 0x80008000u); }
DEVICE u32 mul_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }
DEVICE u32 sub_bf16x2(u32 a, u32 b) { return fma_bf16x2(b, 0xBF80BF80u, a); }
#if __CUDA_ARCH__ >= 900
SLIMKV_OF_2(max_u16x2, "max.u16x2")
#else
DEVICE u32 max_u16x2(u32 a, u32 b) {  // the larger word has the larger high half
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a, b) & 0xFFFF0000u;
}
#endif

// Within a warp.
DEVICE u32 shfl_xor(u32 x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE i32 shfl_xor(i32 x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE float shfl_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE i64 shfl_xor(i64 x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE u32 shfl(u32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE i32 shfl(i32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE float shfl(float x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE i64 shfl(i64 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE bool warp_any(bool p) { return __any_sync(0xFFFFFFFFu, p); }
// Over all lanes, in one instruction.
DEVICE u32 warp_sum(u32 x) {
  u32 r;
  asm volatile("redux.sync.add.u32 %0, %1, 0xFFFFFFFF;" : "=r"(r) : "r"(x));
  return r;
}
DEVICE u32 warp_max(u32 x) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(r) : "r"(x));
  return r;
}
DEVICE u32 warp_ballot(bool p) { return __ballot_sync(0xFFFFFFFFu, p); }
DEVICE int warp_count(bool p) { return __popc(__ballot_sync(0xFFFFFFFFu, p)); }

// Transposes an 8 x 8 matrix of 16-bit elements, of which lane 4 r + c holds elements 2 c and 2 c + 1 of row r.
DEVICE u32 movmatrix_trans(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory into fragments: lane 8 m + r has the address of row r
// of matrix m. The second function loads their transposes.
DEVICE void ldmatrix_x4(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
      : "r"(address)
      : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
      : "r"(address)
      : "memory");
}

// c plus the four products of the bytes of a and b.
SLIMKV_OF_3(dp4a_u8, u32, "dp4a.u32.u32")
SLIMKV_OF_3(dp4a_u8_s8, i32, "dp4a.u32.s32")
SLIMKV_OF_3(dp4a_s8, i32, "dp4a.s32.s32")
// x >> 16, on the units that multiply: logic is what unpacking has too little of.
SLIMKV_OF_3(dp2a_low, u32, "dp2a.lo.u32.u32")
DEVICE u32 high_half(u32 x) { return dp2a_low(x, 0x0100u, 0u); }

// c += A B, A 16 x k row by row, B k x 8 column by column, in the lanes' fragments (see docs/design/page-format.md).
#define SLIMKV_MMA(name, types) \
  DEVICE void name(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
  }
SLIMKV_MMA(mma_u8_s8, "u8.s8")
SLIMKV_MMA(mma_s8_s8, "s8.s8")
SLIMKV_MMA(mma_s8_u8, "s8.u8")
SLIMKV_MMA(mma_u8_u8, "u8.u8")
#define SLIMKV_MMA_FLOATS(name, type) \
  DEVICE void name(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
  }
SLIMKV_MMA_FLOATS(mma_f16, "f16")
SLIMKV_MMA_FLOATS(mma_bf16, "bf16")

// d = c + A B. With zeros or a shared c no register has to be cleared first.
#define SLIMKV_MMA_FROM(name, types) \
  DEVICE void name(i32(&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, i32 c0, i32 c1, i32 c2, i32 c3) { \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." types \
        ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3)); \
  }
SLIMKV_MMA_FROM(mma_u8_s8_from, "u8.s8")
SLIMKV_MMA_FROM(mma_u8_u8_from, "u8.u8")
#define SLIMKV_MMA_FROM_ZERO(name, type) \
  DEVICE void name(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f)); \
  }
SLIMKV_MMA_FROM_ZERO(mma_f16_from_zero, "f16")
SLIMKV_MMA_FROM_ZERO(mma_bf16_from_zero, "bf16")

// x, of which the compiler no longer knows that all lanes have the same: it stays in a register of each lane.
DEVICE u32 in_register(u32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
// x = to, in the register that x has.
DEVICE void overwrite(float& x, float to) { asm volatile("mov.f32 %0, %1;" : "+f"(x) : "f"(to)); }

// The lane's number, asked for anew: what a loop derives from it is not kept in registers from turn to turn.
DEVICE int read_laneid() {
  int r;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
  return r;
}

// Memory.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A word of a table that does not change any more.
template <int OFFSET = 0> DEVICE u32 ld_shared_constant(u32 address) {
  u32 r;
  asm("ld.shared.u32 %0, [%1+%2];" : "=r"(r) : "r"(address), "n"(OFFSET));
  return r;
}
DEVICE Words4 ld_shared_constant_16(u32 address) {
  Words4 r;
  asm("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
  return r;
}
// An address from which nothing is loaded before what was stored so far is there.
DEVICE u32 settled(u32 address) {
  asm volatile("" : "+r"(address)::"memory");
  return address;
}
DEVICE u32 ld_shared_constant_half(u32 address) {
  u32 r;
  asm("{.reg .b16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(r) : "r"(address));
  return r;
}
template <int OFFSET> DEVICE void st_shared_words4(u32 address, const Words4& x) {
  asm volatile("st.shared.v4.b32 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w),
      "n"(OFFSET)
      : "memory");
}
DEVICE void cp_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
      : "memory");
}
// The same OFFSET bytes behind both addresses, which then costs no additions.
template <int OFFSET> DEVICE void cp_async_16_behind(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %2], 16;" ::"r"(shared), "l"(global), "n"(OFFSET)
      : "memory");
}
// 16 zeros where there is nothing to copy; the address is then not used.
DEVICE void cp_async_16_or_zero(bool real, void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
      "r"(real ? 16 : 0)
      : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }
// Data that is read once, and tables that are read again and again.
DEVICE Words4 ldg_streaming(const void* p) {
  Words4 r;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE Words4 ldg_cached(const void* p) {
  Words4 r;
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE u32 ldg_word(const void* p) { return __ldg((const u32*)p); }
DEVICE i32 ldg_i32(const i32* p) { return __ldg(p); }

// Counts that one kernel adds to while another may be reading them.
DEVICE i32 ld_acquire(const i32* p) {
  i32 r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
DEVICE void add_relaxed(i32* p, i32 x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// A grid may start while the one before it is still finishing; what that one wrote is there after the wait.
DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// What some threads of a block do at their end, if the block must not end before that grid.
DEVICE void end_behind_grid_before() { griddepcontrol_wait(); }
#endif

// Before anything that another kernel may have written is read, or written. The next grid may start only then, so that
// whatever came before this one has ended for it as well.
DEVICE void pdl_wait() {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
}

// Quotients of non-negative numbers. Code that a thread block runs once waits for its instructions, and n / d takes 22.
DEVICE int small_quotient(int n, int d) {  // n < 2^20: 0.5 / d away from any integer
  return (int)(((float)n + 0.5f) * rcp_approx((float)d));
}
DEVICE int quotient(int n, int d) {
  const float inverse = rcp_approx((float)d);
  int q = (int)((float)n * inverse);
  q += (int)((float)(n - q * d) * inverse);  // at most one off now
  const int left = n - q * d;
  return q + (left >= d) - (left < 0);
}
