// Named functions for the instructions of the kernels, which contain no assembly themselves. To run kernels elsewhere,
// only this file and hopper.cuh must be replaced: tests run them on a CPU (tests/ops/cuda/host.h), where every lane is
// a coroutine. NVRTC compiles this file without headers of the CUDA toolkit.
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
#define SHARED_OPERANDS(name) extern __shared__ __align__(1024) u8 name[]  // alignment of swizzled rows (hopper.cuh)
#define GRID_CONSTANT const __grid_constant__
#define HOST_TESTABLE(name, Args)  // tests define a launcher

// Defines a function of one asm statement: result, its constraint, name, parameters, text, and operands from %1 on.
// FIXED: volatile, neither moved nor dropped.
#define SLIMKV_ASM_AS(QUALIFIER, R, C, name, parameters, text, ...) \
  DEVICE R name parameters { \
    R r; \
    asm QUALIFIER(text : "=" C(r) : __VA_ARGS__); \
    return r; \
  }
#define SLIMKV_ASM(R, C, name, parameters, text, ...) SLIMKV_ASM_AS(, R, C, name, parameters, text, __VA_ARGS__)
#define SLIMKV_ASM_FIXED(R, C, name, parameters, text, ...) \
  SLIMKV_ASM_AS(volatile, R, C, name, parameters, text, __VA_ARGS__)
// The same for statements that access memory or synchronise.
#define SLIMKV_ASM_MEMORY(name, parameters, text, ...) \
  DEVICE void name parameters { asm volatile(text::__VA_ARGS__ : "memory"); }

struct __align__(8) Words2 { u32 x, y; };
struct __align__(16) Words4 { u32 x, y, z, w; };

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_index_y() { return blockIdx.y; }
DEVICE int block_count() { return gridDim.x; }
DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// Named barrier `number` (from 1 on) of some warps of a thread block, with `threads` threads in all.
SLIMKV_ASM_MEMORY(sync_team, (int number, int threads), "bar.sync %0, %1;", "r"(number), "r"(threads));
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

// Instructions on two or three words, or on one float.
#define SLIMKV_OF_2(name, instruction) \
  SLIMKV_ASM(u32, "r", name, (u32 a, u32 b), instruction " %0, %1, %2;", "r"(a), "r"(b))
#define SLIMKV_OF_3(name, T, instruction) \
  SLIMKV_ASM(T, "r", name, (u32 a, u32 b, T c), instruction " %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c))
#define SLIMKV_OF_FLOAT(name, instruction) SLIMKV_ASM(float, "f", name, (float x), instruction " %0, %1;", "f"(x))

// Byte i of the result is byte s_i of (a, b), where s_i is nibble i of the third operand; if bit 3 of s_i is set, the
// byte's sign is replicated eight times instead.
SLIMKV_OF_3(prmt, u32, "prmt.b32");
// Bits of a where the mask is one and of b elsewhere. For constant masks, the compiler does not find this instruction.
SLIMKV_ASM(u32, "r", bit_select, (u32 mask, u32 a, u32 b), "lop3.b32 %0, %1, %2, %3, 0xCA;", "r"(mask), "r"(a), "r"(b));

// Approximations, accurate to a few ulps.
SLIMKV_OF_FLOAT(exp2_approx, "ex2.approx.ftz.f32");
SLIMKV_OF_FLOAT(log2_approx, "lg2.approx.ftz.f32");
SLIMKV_OF_FLOAT(rcp_approx, "rcp.approx.ftz.f32");
SLIMKV_OF_FLOAT(rsqrt_approx, "rsqrt.approx.ftz.f32");

// Single IEEE operations, never contracted.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
// Branch-free and also correctly rounded, for normal numbers whose quotient and remainders are normal.
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
// ceil(a * b * 2^149) + zero, from the unrounded product; `zero` must make it positive. The result is a denormal
// number, whose bits are the integer. The second function clamps it to at least 0.
#define SLIMKV_CEIL_PRODUCT(name, instruction) \
  DEVICE u32 name(float a, float b, int zero) { \
    float r; \
    asm(instruction " %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(__uint_as_float(zero))); \
    return __float_as_uint(r); \
  }
SLIMKV_CEIL_PRODUCT(ceil_product, "fma.rp.f32");
SLIMKV_CEIL_PRODUCT(ceil_product_or_zero, "fma.rp.sat.f32");
DEVICE float floor_of(float x) { return floorf(x); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE int min_i32(int a, int b) { return min(a, b); }
DEVICE int max_i32(int a, int b) { return max(a, b); }
DEVICE u32 max_u32(u32 a, u32 b) { return max(a, b); }

// 16-bit floats as bits.
SLIMKV_ASM(float, "f", f16_to_f32, (u32 x), "{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}", "r"(x));
SLIMKV_ASM(u32, "r", f32_to_f16, (float x), "{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}", "f"(x));
SLIMKV_ASM(u32, "r", f32_to_bf16, (float x), "{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}", "f"(x));
SLIMKV_ASM(u32, "r", pack_f16x2, (float low, float high), "cvt.rn.f16x2.f32 %0, %1, %2;", "f"(high), "f"(low));
SLIMKV_ASM(u32, "r", pack_bf16x2, (float low, float high), "cvt.rn.bf16x2.f32 %0, %1, %2;", "f"(high), "f"(low));
// e4m3, rounded to nearest even and saturated at 448: two numbers in the low half of a word, or four, the first in the
// lowest byte. The last function converts two to fp16. Only sm_90a kernels use these functions.
#if __CUDA_ARCH__ >= 890
SLIMKV_ASM(u32, "r", pack_e4m3x2, (float low, float high),
    "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}", "f"(high), "f"(low));
SLIMKV_ASM(u32, "r", pack_e4m3x4, (float a, float b, float c, float d),
    "{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; "
    "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, y};}",
    "f"(a), "f"(b), "f"(c), "f"(d));
SLIMKV_ASM(u32, "r", unpack_e4m3x2, (u32 x), "{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}", "r"(x));
#else
DEVICE u32 pack_e4m3x2(float, float) { return 0; }
DEVICE u32 pack_e4m3x4(float, float, float, float) { return 0; }
DEVICE u32 unpack_e4m3x2(u32) { return 0; }
#endif
// Elementwise, the larger magnitude with an arbitrary sign; NaN if either is NaN.
#if __CUDA_ARCH__ >= 860
SLIMKV_OF_2(max_abs_f16x2, "max.NaN.xorsign.abs.f16x2");
SLIMKV_OF_2(max_abs_bf16x2, "max.NaN.xorsign.abs.bf16x2");
#else
SLIMKV_OF_2(max_f16x2, "max.NaN.f16x2");
SLIMKV_OF_2(max_bf16x2, "max.NaN.bf16x2");
DEVICE u32 max_abs_f16x2(u32 a, u32 b) { return max_f16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
DEVICE u32 max_abs_bf16x2(u32 a, u32 b) { return max_bf16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
#endif
// Elementwise, rounded once, with denormal numbers; adding -0 preserves the sign of a product.
SLIMKV_OF_3(fma_f16x2, u32, "fma.rn.f16x2");
SLIMKV_OF_3(fma_bf16x2, u32, "fma.rn.bf16x2");
SLIMKV_OF_2(sub_f16x2, "sub.rn.f16x2");
DEVICE u32 mul_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, 0x80008000u); }
DEVICE u32 mul_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }
DEVICE u32 sub_bf16x2(u32 a, u32 b) { return fma_bf16x2(b, 0xBF80BF80u, a); }
#if __CUDA_ARCH__ >= 900
SLIMKV_OF_2(max_u16x2, "max.u16x2");
#else
DEVICE u32 max_u16x2(u32 a, u32 b) {  // the larger word has the larger high half
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a, b) & 0xFFFF0000u;
}
#endif

// Within a warp.
template <class T> DEVICE T shfl_xor(T x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
template <class T> DEVICE T shfl(T x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
DEVICE bool warp_any(bool p) { return __any_sync(0xFFFFFFFFu, p); }
// Over all lanes, in one instruction.
SLIMKV_ASM_FIXED(u32, "r", warp_sum, (u32 x), "redux.sync.add.u32 %0, %1, 0xFFFFFFFF;", "r"(x));
SLIMKV_ASM_FIXED(u32, "r", warp_max, (u32 x), "redux.sync.max.u32 %0, %1, 0xFFFFFFFF;", "r"(x));
DEVICE u32 warp_ballot(bool p) { return __ballot_sync(0xFFFFFFFFu, p); }
DEVICE int bit_count(u32 x) { return __popc(x); }

// Transposes an 8 x 8 matrix of 16-bit elements; lane 4 r + c holds elements 2 c and 2 c + 1 of row r.
SLIMKV_ASM_FIXED(u32, "r", movmatrix_trans, (u32 x), "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;", "r"(x));
// Loads four 8 x 8 matrices of 16-bit elements from shared memory into fragments; lane 8 m + r provides the address of
// row r of matrix m. The second function transposes them.
#define SLIMKV_LDMATRIX(name, shape) \
  DEVICE void name(u32(&m)[4], u32 address) { \
    asm volatile("ldmatrix.sync.aligned." shape ".shared.b16 {%0, %1, %2, %3}, [%4];" \
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) \
        : "r"(address) \
        : "memory"); \
  }
SLIMKV_LDMATRIX(ldmatrix_x4, "m8n8.x4");
SLIMKV_LDMATRIX(ldmatrix_x4_trans, "m8n8.x4.trans");

// c plus the four products of the bytes of a and b.
SLIMKV_OF_3(dp4a_u8, u32, "dp4a.u32.u32");
SLIMKV_OF_3(dp4a_u8_s8, i32, "dp4a.u32.s32");
SLIMKV_OF_3(dp4a_s8, i32, "dp4a.s32.s32");
// x >> 16 as a multiplication, because unpacking is bound by the logic units.
SLIMKV_OF_3(dp2a_low, u32, "dp2a.lo.u32.u32");
DEVICE u32 high_half(u32 x) { return dp2a_low(x, 0x0100u, 0u); }

// c += A B, with A 16 x k row-major and B k x 8 column-major, in the lanes' fragments (docs/design/page-format.md).
// from_zero is d = A B, without clearing registers first.
#define SLIMKV_MMA(name, T, C, shape) \
  DEVICE void name(T c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+" C(c[0]), "+" C(c[1]), "+" C(c[2]), "+" C(c[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
  } \
  DEVICE void name##_from_zero(T(&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};" \
        : "=" C(d[0]), "=" C(d[1]), "=" C(d[2]), "=" C(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), C((T)0)); \
  }
SLIMKV_MMA(mma_u8_s8, i32, "r", "m16n8k32.row.col.s32.u8.s8.s32");
SLIMKV_MMA(mma_s8_s8, i32, "r", "m16n8k32.row.col.s32.s8.s8.s32");
SLIMKV_MMA(mma_s8_u8, i32, "r", "m16n8k32.row.col.s32.s8.u8.s32");
SLIMKV_MMA(mma_u8_u8, i32, "r", "m16n8k32.row.col.s32.u8.u8.s32");
SLIMKV_MMA(mma_f16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32");
SLIMKV_MMA(mma_bf16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32");

// Returns x, hidden from the compiler's uniformity analysis, so that it stays in a per-lane register.
DEVICE u32 in_register(u32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
// x = to, as a move into the register that x already occupies.
DEVICE void overwrite(float& x, float to) { asm volatile("mov.f32 %0, %1;" : "+f"(x) : "f"(to)); }

// An exit that is never taken. The assembler moves no instructions across it.
DEVICE void stay(bool always) {
  if (!always) asm volatile("exit;");
}

// Rereads the lane index, so that values derived from it are recomputed instead of occupying registers across a loop.
DEVICE int read_laneid() {
  int r;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
  return r;
}

// Memory.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Returns an address whose loads the compiler does not move above earlier stores.
DEVICE u32 settled(u32 address) {
  asm volatile("" : "+r"(address)::"memory");
  return address;
}
// Loads a word, half a word or four words of a table that no longer changes.
template <int OFFSET = 0>
SLIMKV_ASM(u32, "r", ld_shared_constant, (u32 address), "ld.shared.u32 %0, [%1+%2];", "r"(address), "n"(OFFSET));
SLIMKV_ASM(u32, "r", ld_shared_constant_half, (u32 address), "{.reg .b16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}",
    "r"(address));
#define SLIMKV_LOAD_WORDS4(name, instruction, T, C) \
  DEVICE Words4 name(T p) { \
    Words4 r; \
    asm(instruction ".v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : C(p)); \
    return r; \
  }
SLIMKV_LOAD_WORDS4(ld_shared_constant_16, "ld.shared", u32, "r");
// Loads of data that is read once, and of tables that are read repeatedly.
SLIMKV_LOAD_WORDS4(ldg_streaming, "ld.global.nc.L1::no_allocate", const void*, "l");
SLIMKV_LOAD_WORDS4(ldg_cached, "ld.global.nc", const void*, "l");
template <int OFFSET>
SLIMKV_ASM_MEMORY(st_shared_words4, (u32 address, const Words4& x), "st.shared.v4.b32 [%0 + %5], {%1, %2, %3, %4};",
    "r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "n"(OFFSET));
SLIMKV_ASM_MEMORY(cp_async_4, (void* shared, const void* global), "cp.async.ca.shared.global [%0], [%1], 4;",
    "r"(shared_address(shared)), "l"(global));
SLIMKV_ASM_MEMORY(cp_async_16, (void* shared, const void* global), "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;",
    "r"(shared_address(shared)), "l"(global));
// OFFSET is added to both addresses without an instruction.
template <int OFFSET>
SLIMKV_ASM_MEMORY(cp_async_16_behind, (u32 shared, const void* global),
    "cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %2], 16;", "r"(shared), "l"(global), "n"(OFFSET));
// Unless `real`, writes 16 zero bytes and does not access `global`.
SLIMKV_ASM_MEMORY(cp_async_16_or_zero, (bool real, void* shared, const void* global),
    "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;", "r"(shared_address(shared)), "l"(global),
    "r"(real ? 16 : 0));
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE u32 ldg_word(const void* p) { return __ldg((const u32*)p); }
DEVICE i32 ldg_i32(const i32* p) { return __ldg(p); }

// Counters that one thread block increments while another polls them.
DEVICE i32 ld_acquire(const i32* p) {
  i32 r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
SLIMKV_ASM_MEMORY(add_relaxed, (i32 * p, i32 x), "red.relaxed.gpu.global.add.s32 [%0], %1;", "l"(p), "r"(x));
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// Programmatic dependent launch: a grid may start before the previous one ends; its writes are visible after the wait.
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
#endif

// Call before any access to memory that other kernels use. The next grid starts only after this call; all grids before
// this one have finished by then.
DEVICE void pdl_wait() {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
}

// Quotients of non-negative numbers. n / d takes 22 instructions, which are slow to fetch in code that runs once.
DEVICE int small_quotient(int n, int d) {  // n < 2^20: (n + 0.5) / d is at least 0.5 / d from any integer
  return (int)(((float)n + 0.5f) * rcp_approx((float)d));
}
DEVICE int quotient(int n, int d) {
  const float inverse = rcp_approx((float)d);
  int q = (int)((float)n * inverse);
  q += (int)((float)(n - q * d) * inverse);  // off by at most one
  const int left = n - q * d;
  return q + (left >= d) - (left < 0);
}
