// What sm_90a has beyond intrinsics.cuh: products of a warpgroup (four warps, 64 rows) with operands in shared memory,
// copies that report to a barrier, and registers that warps hand to one another.
#pragma once
#include "common/intrinsics.cuh"
#ifdef SLIMKV_HOST
#include "hopper_host.h"
#else

// ---- barriers in shared memory ------------------------------------------------------------------------------------

// A phase ends when `count` threads have arrived and all bytes that were announced have landed.
DEVICE void mbarrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
      : "memory");
}
// Waits for the end of the phase whose number has this last bit.
DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::
          "r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Global to shared memory, 16-byte units.
DEVICE void cp_async_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Makes this thread's stores to shared memory, and those it has synchronised with, visible to WGMMA and bulk copies. It
// waits for all outstanding memory accesses of the thread.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Makes what other threads' stores to global memory were seen to have written visible to copies of this thread.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit elements from fragments into rows of 16 bytes: lane 8 m + r has the address of
// row r of matrix m, to which OFFSET is added.
template <int OFFSET> DEVICE void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
      "r"(m2), "r"(m3), "n"(OFFSET)
      : "memory");
}

// The same of their transposes.
template <int OFFSET> DEVICE void stmatrix_x2_trans(u32 address, u32 m0, u32 m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0 + %3], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1),
      "n"(OFFSET)
      : "memory");
}
template <int OFFSET> DEVICE void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
      "r"(m1), "r"(m2), "r"(m3), "n"(OFFSET)
      : "memory");
}

// Barriers 1-15 of the block, of `threads` that either wait or only arrive.
DEVICE void bar_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE void bar_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int N> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- products of a warpgroup --------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Nothing that reads or writes x moves across.
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
#define HELD_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define HELD_8(i) HELD_4(i), HELD_4(i + 4)
#define HELD_ALL_32 HELD_32
#define HELD_ALL_4 HELD_4(0)
#define HELD_ALL_8 HELD_8(0)
#define HELD_ALL_12 HELD_8(0), HELD_4(8)
#define HELD_ALL_16 HELD_8(0), HELD_8(8)
#define HELD_ALL_20 HELD_ALL_16, HELD_4(16)
#define HELD_ALL_24 HELD_ALL_16, HELD_8(16)
#define HELD_ALL_28 HELD_ALL_24, HELD_4(24)
#define HELD_32 HELD_8(0), HELD_8(8), HELD_8(16), HELD_8(24)
#define HELD_48 HELD_32, HELD_8(32), HELD_8(40)
#define HELD_96 HELD_64, HELD_8(64), HELD_8(72), HELD_8(80), HELD_8(88)
#define HELD_64 HELD_32, HELD_8(32), HELD_8(40), HELD_8(48), HELD_8(56)

#define HELD_128 \
  HELD_64, HELD_8(64), HELD_8(72), HELD_8(80), HELD_8(88), HELD_8(96), HELD_8(104), HELD_8(112), HELD_8(120)

template <int N> struct Wgmma;
// shared_a: c [64, N] = (or, ADD, +=) A B in fp16; operands of 64 x 16 and N x 16, the 16 contiguous.
// register_a: c += A B, A in fragments, B 16 x N with N contiguous. shared_a_across: A in shared memory, the same B.
#define SLIMKV_WGMMA(N, R, A0, A1, A2, A3, B, ADDS) \
  template <> struct Wgmma<N> { \
    template <bool ADD> DEVICE_MEMBER static void shared_a(float (&c)[R], u64 a, u64 b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32.f16.f16 {" REGISTERS_##R "}, %" A0 ", %" A1 ", p, 1, 1, 0, 0;\n}" \
          : HELD_##R \
          : "l"(a), "l"(b), "n"((int)ADD)); \
    } \
    DEVICE_MEMBER static void register_a(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32.f16.f16 {" REGISTERS_##R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, 1;\n}" \
          : HELD_##R \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(1)); \
    } \
    DEVICE_MEMBER static void shared_a_across(float (&c)[R], u64 a, u64 b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32.f16.f16 {" REGISTERS_##R "}, %" A0 ", %" A1 ", p, 1, 1, 0, 1;\n}" \
          : HELD_##R \
          : "l"(a), "l"(b), "n"(1)); \
    } \
  };
// 8-bit operands: c [64, N] (+)= A B, B is N x 32, the 32 contiguous.
// s8: signed, c in integers, A in shared memory in the same order; ADD adds to c, otherwise the sum starts from zero.
// e4m3: c in floats, A 64 x 32 in fragments; add: as above. The hardware keeps about 14 bits of e4m3 sums, whatever the
// accumulator, so long sums must be promoted.
#define HELD_INTEGERS_4(i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3])
#define HELD_INTEGERS_8(i) HELD_INTEGERS_4(i), HELD_INTEGERS_4(i + 4)
#define HELD_INTEGERS_32 HELD_INTEGERS_8(0), HELD_INTEGERS_8(8), HELD_INTEGERS_8(16), HELD_INTEGERS_8(24)
#define HELD_INTEGERS_64 \
  HELD_INTEGERS_32, HELD_INTEGERS_8(32), HELD_INTEGERS_8(40), HELD_INTEGERS_8(48), HELD_INTEGERS_8(56)
template <int N> struct WgmmaBytes;
#define SLIMKV_WGMMA_BYTES(N, R, A0, A1, A2, A3, B, ADDS) \
  template <> struct WgmmaBytes<N> { \
    template <bool ADD> DEVICE_MEMBER static void s8(u32 (&c)[R], u64 a, u64 b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k32.s32.s8.s8 {" REGISTERS_##R "}, %" A0 ", %" A1 ", p;\n}" \
          : HELD_INTEGERS_##R \
          : "l"(a), "l"(b), "n"((int)ADD)); \
    } \
    DEVICE_MEMBER static void e4m3(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k32.f32.e4m3.e4m3 {" REGISTERS_##R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p, 1, 1;\n}" \
          : HELD_##R \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add)); \
    } \
  };
template <> struct WgmmaBytes<8> {
  DEVICE_MEMBER static void e4m3(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1;\n}"
        : HELD_4(0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
  }
};
SLIMKV_WGMMA_BYTES(64, 32, "32", "33", "34", "35", "36", "37")
SLIMKV_WGMMA_BYTES(128, 64, "64", "65", "66", "67", "68", "69")
SLIMKV_WGMMA(64, 32, "32", "33", "34", "35", "36", "37")
SLIMKV_WGMMA(96, 48, "48", "49", "50", "51", "52", "53")
SLIMKV_WGMMA(192, 96, "96", "97", "98", "99", "100", "101")
SLIMKV_WGMMA(128, 64, "64", "65", "66", "67", "68", "69")
SLIMKV_WGMMA(256, 128, "128", "129", "130", "131", "132", "133")

template <int N, bool BF16> struct WgmmaNarrow;
// c += A B with few columns, in fp16 or (BF16) bfloat16; B is N x 16, the 16 contiguous. register_a: A in fragments;
// without ADD, c = A B. shared_a: A is 64 x 16, the 16 contiguous. transposed_a: A is 16 x 64, the 64 contiguous, and
// its transpose is multiplied.
#define SLIMKV_WGMMA_NARROW(N, R, A0, A1, A2, A3, B, BF16, TYPE) \
  template <> struct WgmmaNarrow<N, BF16> { \
    template <bool ADD = true> \
    DEVICE_MEMBER static void register_a(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      if (!ADD) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                     "." TYPE " {" REGISTERS_##R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, 0;\n}" \
            : HELD_ALL_##R \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
        return; \
      } \
      asm volatile("{\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS_##R \
          "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", 1, 1, 1, 0;\n}" \
          : HELD_ALL_##R \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); \
    } \
    DEVICE_MEMBER static void shared_a(float (&c)[R], u64 a, u64 b) { \
      asm volatile("{\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS_##R \
          "}, %" A0 ", %" A1 ", 1, 1, 1, 0, 0;\n}" \
          : HELD_ALL_##R \
          : "l"(a), "l"(b)); \
    } \
    DEVICE_MEMBER static void transposed_a(float (&c)[R], u64 a, u64 b) { \
      asm volatile("{\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS_##R \
          "}, %" A0 ", %" A1 ", 1, 1, 1, 1, 0;\n}" \
          : HELD_ALL_##R \
          : "l"(a), "l"(b)); \
    } \
  };
#define SLIMKV_WGMMA_NARROW_BOTH(N, R, A0, A1, A2, A3, B) \
  SLIMKV_WGMMA_NARROW(N, R, A0, A1, A2, A3, B, false, "f16") \
  SLIMKV_WGMMA_NARROW(N, R, A0, A1, A2, A3, B, true, "bf16")
SLIMKV_WGMMA_NARROW_BOTH(8, 4, "4", "5", "6", "7", "8")
SLIMKV_WGMMA_NARROW_BOTH(16, 8, "8", "9", "10", "11", "12")
SLIMKV_WGMMA_NARROW_BOTH(24, 12, "12", "13", "14", "15", "16")
SLIMKV_WGMMA_NARROW_BOTH(32, 16, "16", "17", "18", "19", "20")
SLIMKV_WGMMA_NARROW_BOTH(40, 20, "20", "21", "22", "23", "24")
SLIMKV_WGMMA_NARROW_BOTH(56, 28, "28", "29", "30", "31", "32")
SLIMKV_WGMMA_NARROW_BOTH(48, 24, "24", "25", "26", "27", "28")
SLIMKV_WGMMA_NARROW_BOTH(64, 32, "32", "33", "34", "35", "36")
#endif

// A descriptor of an operand in shared memory with 128-byte swizzle: in every 8 rows of 128 bytes (1,024 bytes,
// aligned), 16-byte unit u of row r is at u ^ (r & 7). `apart`: bytes from one group of 64 columns to the next, where
// columns are contiguous over the other axis of the product.
DEVICE u64 smem_descriptor(u32 address, int apart) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// The same so many bytes further on, by an addition that has no carry.
DEVICE u64 descriptor_behind(u64 operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000ull) | (u32)((u32)operand + (bytes >> 4));
}
