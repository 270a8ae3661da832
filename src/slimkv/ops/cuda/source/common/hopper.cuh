// Instructions of sm_90a: wgmma, bulk copies with mbarriers, and setmaxnreg.
#pragma once
#include "common/intrinsics.cuh"
#ifdef SLIMKV_HOST
#include "hopper_host.h"
#else

// ---- barriers in shared memory ------------------------------------------------------------------------------------

// A phase completes when `count` threads have arrived and all expected bytes have been copied.
SLIMKV_ASM_MEMORY(mbarrier_init, (u64 * barrier, int count), "mbarrier.init.shared::cta.b64 [%0], %1;",
    "r"(shared_address(barrier)), "r"(count));
SLIMKV_ASM_MEMORY(mbarrier_arrive, (u64 * barrier), "mbarrier.arrive.shared::cta.b64 _, [%0];",
    "r"(shared_address(barrier)));
SLIMKV_ASM_MEMORY(mbarrier_arrive_expect_tx, (u64 * barrier, u32 bytes),
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "r"(shared_address(barrier)), "r"(bytes));
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Waits until the phase of this parity has completed.
SLIMKV_ASM_MEMORY(mbarrier_wait, (u64 * barrier, u32 parity),
    "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
    "@p bra DONE;\nbra AGAIN;\nDONE:\n}",
    "r"(shared_address(barrier)), "r"(parity));
// Copies from global to shared memory, in multiples of 16 bytes.
SLIMKV_ASM_MEMORY(cp_async_bulk, (void* shared, const void* global, u32 bytes, u64* barrier),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
    "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)));
// Makes this thread's stores to shared memory, and those it has synchronised with, visible to wgmma and bulk copies.
// Waits for all outstanding memory accesses of the thread.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Makes other threads' stores to global memory, once observed, visible to bulk copies of this thread.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit elements, or their transposes, from fragments into rows of 16 bytes; lane 8 m +
// r provides the address of row r of matrix m, to which OFFSET is added.
#define SLIMKV_STMATRIX_X4(name, shape) \
  template <int OFFSET> \
  SLIMKV_ASM_MEMORY(name, (u32 address, u32 m0, u32 m1, u32 m2, u32 m3), \
      "stmatrix.sync.aligned." shape ".shared.b16 [%0 + %5], {%1, %2, %3, %4};", "r"(address), "r"(m0), "r"(m1), \
      "r"(m2), "r"(m3), "n"(OFFSET))
SLIMKV_STMATRIX_X4(stmatrix_x4, "m8n8.x4");
SLIMKV_STMATRIX_X4(stmatrix_x4_trans, "m8n8.x4.trans");
template <int OFFSET>
SLIMKV_ASM_MEMORY(stmatrix_x2_trans, (u32 address, u32 m0, u32 m1),
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0 + %3], {%1, %2};", "r"(address), "r"(m0), "r"(m1), "n"(OFFSET));

// Named barriers 1-15 of a thread block; `threads` counts the threads that wait and those that only arrive.
SLIMKV_ASM_MEMORY(bar_sync, (int number, int threads), "bar.sync %0, %1;", "r"(number), "r"(threads));
SLIMKV_ASM_MEMORY(bar_arrive, (int number, int threads), "bar.arrive %0, %1;", "r"(number), "r"(threads));

template <int N> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- products of a warpgroup --------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// The compiler moves no access to x across this.
template <int N> DEVICE void wgmma_fence_operand(float (&x)[N]) {
  UNROLL_FOR (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void wgmma_fence_operand(u32 (&x)[N]) {
  UNROLL_FOR (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

#define REGISTERS_4 "%0,%1,%2,%3"
#define REGISTERS_8 REGISTERS_4 ",%4,%5,%6,%7"
#define REGISTERS_12 REGISTERS_8 ",%8,%9,%10,%11"
#define REGISTERS_16 REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_20 REGISTERS_16 ",%16,%17,%18,%19"
#define REGISTERS_24 REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REGISTERS_28 REGISTERS_24 ",%24,%25,%26,%27"
#define REGISTERS_32 REGISTERS_28 ",%28,%29,%30,%31"
#define REGISTERS_48 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64 REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_96 \
  REGISTERS_64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_128 \
  REGISTERS_96 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The accumulators c as operands of constraint C.
#define FOUR_OF(C, i) C(c[i]), C(c[i + 1]), C(c[i + 2]), C(c[i + 3])
#define EIGHT_OF(C, i) FOUR_OF(C, i), FOUR_OF(C, i + 4)
#define HELD_4(C) FOUR_OF(C, 0)
#define HELD_8(C) EIGHT_OF(C, 0)
#define HELD_12(C) HELD_8(C), FOUR_OF(C, 8)
#define HELD_16(C) HELD_8(C), EIGHT_OF(C, 8)
#define HELD_20(C) HELD_16(C), FOUR_OF(C, 16)
#define HELD_24(C) HELD_16(C), EIGHT_OF(C, 16)
#define HELD_28(C) HELD_24(C), FOUR_OF(C, 24)
#define HELD_32(C) HELD_24(C), EIGHT_OF(C, 24)
#define HELD_48(C) HELD_32(C), EIGHT_OF(C, 32), EIGHT_OF(C, 40)
#define HELD_64(C) HELD_48(C), EIGHT_OF(C, 48), EIGHT_OF(C, 56)
#define HELD_96(C) HELD_64(C), EIGHT_OF(C, 64), EIGHT_OF(C, 72), EIGHT_OF(C, 80), EIGHT_OF(C, 88)
#define HELD_128(C) HELD_96(C), EIGHT_OF(C, 96), EIGHT_OF(C, 104), EIGHT_OF(C, 112), EIGHT_OF(C, 120)

// wgmma with A in shared memory, and with A in registers. A0, ...: numbers of the asm operands after the R
// accumulators: a, b, and whether the product is added to c or replaces it.
#define WGMMA_OF_SHARED(N, R, C, shape, transposed, A0, A1, A2, adds) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N shape \
               " {" REGISTERS_##R "}, %" A0 ", %" A1 ", p" transposed ";\n}" \
      : HELD_##R(C) \
      : "l"(a), "l"(b), adds)
#define WGMMA_OF_REGISTERS(N, R, shape, transposed, A0, A1, A2, A3, A4, A5, adds) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N shape \
               " {" REGISTERS_##R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" A4 ", p" transposed ";\n}" \
      : HELD_##R("+f") \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), adds)

// c [64, N] = A B (ADD: += A B) in fp16 or (BF16) bfloat16, k = 16. A is 64 x 16 with the 16 contiguous (transposed_a:
// 16 x 64 with the 64 contiguous). B is N x 16 with the 16 contiguous (across: 16 x N with the N contiguous).
template <int N, bool BF16> struct WgmmaOf;
#define SLIMKV_WGMMA(N, R, BF16, TYPE, A0, A1, A2, A3, A4, A5) \
  template <> struct WgmmaOf<N, BF16> { \
    template <bool ADD = true> DEVICE_MEMBER static void shared_a(float (&c)[R], u64 a, u64 b) { \
      WGMMA_OF_SHARED(N, R, "+f", "k16.f32." TYPE "." TYPE, ", 1, 1, 0, 0", A0, A1, A2, "n"((int)ADD)); \
    } \
    DEVICE_MEMBER static void shared_a_across(float (&c)[R], u64 a, u64 b) { \
      WGMMA_OF_SHARED(N, R, "+f", "k16.f32." TYPE "." TYPE, ", 1, 1, 0, 1", A0, A1, A2, "n"(1)); \
    } \
    DEVICE_MEMBER static void transposed_a(float (&c)[R], u64 a, u64 b) { \
      WGMMA_OF_SHARED(N, R, "+f", "k16.f32." TYPE "." TYPE, ", 1, 1, 1, 0", A0, A1, A2, "n"(1)); \
    } \
    template <bool ADD = true> \
    DEVICE_MEMBER static void register_a(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      WGMMA_OF_REGISTERS(N, R, "k16.f32." TYPE "." TYPE, ", 1, 1, 0", A0, A1, A2, A3, A4, A5, "n"((int)ADD)); \
    } \
    DEVICE_MEMBER static void register_a_across(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      WGMMA_OF_REGISTERS(N, R, "k16.f32." TYPE "." TYPE, ", 1, 1, 1", A0, A1, A2, A3, A4, A5, "n"(1)); \
    } \
  };
#define SLIMKV_WGMMA_BOTH(N, R, ...) \
  SLIMKV_WGMMA(N, R, false, "f16", __VA_ARGS__) SLIMKV_WGMMA(N, R, true, "bf16", __VA_ARGS__)
SLIMKV_WGMMA_BOTH(8, 4, "4", "5", "6", "7", "8", "9");
SLIMKV_WGMMA_BOTH(16, 8, "8", "9", "10", "11", "12", "13");
SLIMKV_WGMMA_BOTH(24, 12, "12", "13", "14", "15", "16", "17");
SLIMKV_WGMMA_BOTH(32, 16, "16", "17", "18", "19", "20", "21");
SLIMKV_WGMMA_BOTH(40, 20, "20", "21", "22", "23", "24", "25");
SLIMKV_WGMMA_BOTH(48, 24, "24", "25", "26", "27", "28", "29");
SLIMKV_WGMMA_BOTH(56, 28, "28", "29", "30", "31", "32", "33");
SLIMKV_WGMMA_BOTH(64, 32, "32", "33", "34", "35", "36", "37");
SLIMKV_WGMMA(96, 48, false, "f16", "48", "49", "50", "51", "52", "53");
SLIMKV_WGMMA(128, 64, false, "f16", "64", "65", "66", "67", "68", "69");
SLIMKV_WGMMA(192, 96, false, "f16", "96", "97", "98", "99", "100", "101");
SLIMKV_WGMMA(256, 128, false, "f16", "128", "129", "130", "131", "132", "133");
// The names that kernels use. Wgmma: with A in registers, the columns of B are contiguous.
template <int N, bool BF16> using WgmmaNarrow = WgmmaOf<N, BF16>;
template <int N> struct Wgmma : WgmmaOf<N, false> {
  DEVICE_MEMBER static void register_a(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WgmmaOf<N, false>::register_a_across(c, a0, a1, a2, a3, b);
  }
};

// 8-bit operands; B is N x 32 with the 32 contiguous. s8: signed, with int32 accumulators, and A in shared memory with
// the 32 contiguous. e4m3: with fp32 accumulators and A in registers; `add` is ADD at run time. The hardware keeps only
// about 14 bits of e4m3 sums, so long sums must be promoted.
template <int N> struct WgmmaBytes;
#define SLIMKV_WGMMA_BYTES(N, R, A0, A1, A2, A3, A4, A5) \
  template <> struct WgmmaBytes<N> { \
    template <bool ADD> DEVICE_MEMBER static void s8(u32 (&c)[R], u64 a, u64 b) { \
      WGMMA_OF_SHARED(N, R, "+r", "k32.s32.s8.s8", "", A0, A1, A2, "n"((int)ADD)); \
    } \
    DEVICE_MEMBER static void e4m3(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) { \
      WGMMA_OF_REGISTERS(N, R, "k32.f32.e4m3.e4m3", ", 1, 1", A0, A1, A2, A3, A4, A5, "r"(add)); \
    } \
  };
SLIMKV_WGMMA_BYTES(8, 4, "4", "5", "6", "7", "8", "9");
SLIMKV_WGMMA_BYTES(64, 32, "32", "33", "34", "35", "36", "37");
SLIMKV_WGMMA_BYTES(128, 64, "64", "65", "66", "67", "68", "69");
#endif

// The descriptor of an operand in shared memory with 128-byte swizzle: in every 8 rows of 128 bytes (1,024 bytes,
// aligned), 16-byte unit u of row r is at u ^ (r & 7). `apart`: bytes between groups of 64 columns (MN-major operands).
DEVICE u64 smem_descriptor(u32 address, int apart) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// Advances a descriptor by `bytes`, with a 32-bit addition.
DEVICE u64 advance_descriptor(u64 operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000ull) | (u32)((u32)operand + (bytes >> 4));
}
