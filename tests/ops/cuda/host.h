// A GPU emulated on a CPU for tests: every CUDA thread is a coroutine, thread blocks run in turn, and lanes wait for one
// another at collectives (barriers, shuffles, votes, matrix products). It replaces intrinsics.cuh. Lanes that do not
// meet at a collective are an error, shared memory starts as NaNs, and asynchronous copies land only when they are
// awaited, so that missing waits and barriers have an effect.
#pragma once
// Only C headers and no containers: hundreds of libraries include this file, and C++ headers would take a third of the
// time to compile each.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// The number of words that slimkv_host_switch saves on a stack, and the index of its return address.
#if defined(__x86_64__)
#define HOST_SWITCH_WORDS 8
#define HOST_SWITCH_RETURN 6
#elif defined(__aarch64__)
#define HOST_SWITCH_WORDS 20
#define HOST_SWITCH_RETURN 11
#else
#include <ucontext.h>
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define UNROLL_FOR(...) for (__VA_ARGS__)
#define KERNEL(threads, blocks) static void
#define GRID_CONSTANT const
#define SHARED_MEMORY(name) u8* const name = host::machine.shared
#define SHARED_OPERANDS(name) SHARED_MEMORY(name)
#define HOST_TESTABLE(name, Args)                                                                                  \
  static void host_entry_of_##name(const void* args) { name(*static_cast<const Args*>(args)); }                 \
  extern "C" int host_launch_##name(int x, int y, int threads, int shared, const void* args, int args_bytes) {  \
    if (args_bytes != (int)sizeof(Args))                                                                        \
      return host::refuse(#name " takes %d bytes of arguments, got %d", (int)sizeof(Args), args_bytes);         \
    return host::launch(host_entry_of_##name, x, y, threads, shared, args);                                     \
  }

struct alignas(8) Words2 { u32 x, y; };
struct alignas(16) Words4 { u32 x, y, z, w; };

namespace host {

constexpr int STACK_BYTES = 64 * 1024, GUARD_BYTES = 4096, MOST_THREADS = 1024;
constexpr u8 POISON = 0xFF, GUARD = 0xA5;
constexpr u64 STACK_MARK = 0x51CC5CA1AB1E57ACull;

enum State { RUNNING, AT_WARP, AT_BLOCK, DONE };

template <class T> struct List {  // of plain structs, in order
  T* items = nullptr;
  size_t count = 0, room = 0;
  void push_back(const T& x) {
    if (count == room) items = static_cast<T*>(realloc(items, (room = room ? 2 * room : 16) * sizeof(T)));
    items[count++] = x;
  }
  void erase(size_t i) { memmove(items + i, items + i + 1, (--count - i) * sizeof(T)); }
};

struct Copy { void* to; const void* from; int bytes, group; };

struct Thread {
  State state;
  const char* where;  // the collective it waits at
  u64 meetings;       // warp collectives so far: operands of two consecutive ones are kept apart
  int groups;         // committed groups of asynchronous copies
  bool waited;        // whether it waited for the previous grid
  List<Copy> copies;
#ifdef HOST_SWITCH_WORDS
  void* stack_pointer;
#else
  ucontext_t context;
#endif
};

struct Team { int arrived; bool any, result; u64 generation; };

struct Machine {
  Team teams[16];
  Thread threads[MOST_THREADS];
  u64 operands[2][MOST_THREADS][8];
  u8* shared = nullptr;
  int shared_bytes = 0, count = 0, current = 0, block_x = 0, block_y = 0, grid_x = 1, grid_y = 1;
  void (*kernel)(const void*) = nullptr;
  const void* args = nullptr;
  bool failed = false;
  char error[512] = "";
#ifdef HOST_SWITCH_WORDS
  void* scheduler = nullptr;
#else
  ucontext_t scheduler;
#endif
};
static Machine machine;
// Shared by all libraries of a process, as inline variables are with g++. A test process loads hundreds of them. If
// each had its own stacks, fork() would need as much memory as all of them.
inline u8* stacks = nullptr;

static void choose(int i) { machine.current = i; }

static int refuse(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(machine.error, sizeof machine.error, format, list);
  va_end(list);
  return 1;
}
extern "C" const char* host_error() { return machine.error; }

// Switches stacks, and pushes and pops the callee-saved registers. swapcontext() would also save the signal mask with a
// system call, which takes longer than everything else.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.type slimkv_host_switch, @function
slimkv_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size slimkv_host_switch, .-slimkv_host_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.type slimkv_host_switch, %function
slimkv_host_switch:
  stp x19, x20, [sp, -160]!
  stp x21, x22, [sp, 16]
  stp x23, x24, [sp, 32]
  stp x25, x26, [sp, 48]
  stp x27, x28, [sp, 64]
  stp x29, x30, [sp, 80]
  stp d8, d9, [sp, 96]
  stp d10, d11, [sp, 112]
  stp d12, d13, [sp, 128]
  stp d14, d15, [sp, 144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x21, x22, [sp, 16]
  ldp x23, x24, [sp, 32]
  ldp x25, x26, [sp, 48]
  ldp x27, x28, [sp, 64]
  ldp x29, x30, [sp, 80]
  ldp d8, d9, [sp, 96]
  ldp d10, d11, [sp, 112]
  ldp d12, d13, [sp, 128]
  ldp d14, d15, [sp, 144]
  ldp x19, x20, [sp], 160
  ret
.size slimkv_host_switch, .-slimkv_host_switch
)");
#endif
#ifdef HOST_SWITCH_WORDS
extern "C" void slimkv_host_switch(void** save, void* load);
static void to_scheduler() { slimkv_host_switch(&machine.threads[machine.current].stack_pointer, machine.scheduler); }
static void to_thread(int i) { choose(i); slimkv_host_switch(&machine.scheduler, machine.threads[i].stack_pointer); }
#else
static void to_scheduler() { swapcontext(&machine.threads[machine.current].context, &machine.scheduler); }
static void to_thread(int i) { choose(i); swapcontext(&machine.scheduler, &machine.threads[i].context); }
#endif

// Ends the launch without unwinding the coroutines' stacks.
static void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  char text[400];
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  refuse("block (%d, %d), thread %d: %s", machine.block_x, machine.block_y, machine.current, text);
  machine.failed = true;
  to_scheduler();
}

static void thread_main() {
  machine.kernel(machine.args);
  machine.threads[machine.current].state = DONE;
  to_scheduler();
  abort();
}

static void start(int i) {
  Thread& t = machine.threads[i];
  t.state = RUNNING;
  t.where = "the start";
  t.meetings = 0;
  t.groups = 0;
  t.waited = false;
  t.copies.count = 0;
  u8* stack = stacks + (size_t)i * STACK_BYTES;
  memcpy(stack, &STACK_MARK, 8);
#ifdef HOST_SWITCH_WORDS
  void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - HOST_SWITCH_WORDS;
  memset(top, 0, HOST_SWITCH_WORDS * sizeof(void*));
  top[HOST_SWITCH_RETURN] = reinterpret_cast<void*>(thread_main);
  t.stack_pointer = top;
#else
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = stack;
  t.context.uc_stack.ss_size = STACK_BYTES;
  t.context.uc_link = nullptr;
  makecontext(&t.context, thread_main, 0);
#endif
}

// Every other block runs its lanes in reverse order, to expose races.
static int ordered(int i) { return (machine.block_x + machine.block_y) % 2 ? machine.count - 1 - i : i; }
// Warps that lag behind the others, also to expose races: of every two groups of `group` warps, group `which`. They run
// in every 50th turn only, or when no other warp can. SLIMKV_HOST_LAG is "group,which"; without it, none lags.
static struct { int group, which; } lagging;
static bool lags(int warp) { return lagging.group && warp / lagging.group % 2 == lagging.which; }

static bool run_block() {
  memset(machine.shared - GUARD_BYTES, GUARD, GUARD_BYTES);
  memset(machine.shared, POISON, machine.shared_bytes);
  memset(machine.shared + machine.shared_bytes, GUARD, GUARD_BYTES);
  for (int i = 0; i < machine.count; i++) start(i);
  for (Team& team : machine.teams) team = {0, false, false, 0};
  for (int turn = 1;; turn++) {
    bool moved = false;
    for (int k = 0; k < machine.count; k++) {
      int i = ordered(k);
      if (machine.threads[i].state != RUNNING || (turn % 50 && lags(i / 32))) continue;
      to_thread(i);
      if (machine.failed) return false;
      u64 mark;
      memcpy(&mark, stacks + (size_t)i * STACK_BYTES, 8);
      if (mark != STACK_MARK) return refuse("thread %d used more than %d bytes of stack", i, STACK_BYTES), false;
      moved = true;
    }
    int done = 0, at_block = 0;
    for (int w = 0; w < machine.count; w += 32) {
      int at_warp = 0;
      for (int i = w; i < w + 32; i++) {
        State s = machine.threads[i].state;
        done += s == DONE;
        at_block += s == AT_BLOCK;
        at_warp += s == AT_WARP && !strcmp(machine.threads[i].where, machine.threads[w].where);
      }
      if (at_warp == 32) {
        for (int i = w; i < w + 32; i++) machine.threads[i].state = RUNNING;
        moved = true;
      }
    }
    if (done == machine.count) break;
    if (at_block && done + at_block == machine.count) {
      for (int i = 0; i < machine.count; i++)
        if (machine.threads[i].state == AT_BLOCK) machine.threads[i].state = RUNNING;
      moved = true;
    }
    if (!moved && lagging.group && turn % 50) turn += 49 - turn % 50;
    else if (!moved) {
      for (int i = 0, n = 0; i < machine.count; i++) {
        Thread& t = machine.threads[i];
        Thread& first = machine.threads[i / 32 * 32];
        if (t.state == first.state && (t.state == DONE || !strcmp(t.where, first.where)) && n++ < machine.count - 1) continue;
        refuse("block (%d, %d): lanes do not meet: thread %d %s %s, thread %d %s %s", machine.block_x, machine.block_y,
               i / 32 * 32, first.state == DONE ? "has ended after" : "waits at", first.where, i,
               t.state == DONE ? "has ended after" : "waits at", t.where);
        return false;
      }
      return refuse("block (%d, %d): warps do not meet at a barrier", machine.block_x, machine.block_y), false;
    }
  }
  int waited = 0;
  for (int i = 0; i < machine.count; i++) waited += machine.threads[i].waited;
  if (waited && waited < machine.count)
    return refuse("block (%d, %d): %d of %d threads end without waiting for the grid before", machine.block_x, machine.block_y,
                  machine.count - waited, machine.count), false;
  for (int i = 0; i < GUARD_BYTES; i++)
    if (machine.shared[i - GUARD_BYTES] != GUARD || machine.shared[machine.shared_bytes + i] != GUARD)
      return refuse("block (%d, %d) wrote beyond its %d bytes of shared memory", machine.block_x, machine.block_y,
                    machine.shared_bytes), false;
  return true;
}

static int launch(void (*kernel)(const void*), int x, int y, int threads, int shared, const void* args) {
  if (threads < 1 || threads > 1024 || threads % 32) return refuse("%d threads: a multiple of 32 up to 1024", threads);
  if (shared < 0 || shared > 227 * 1024) return refuse("%d bytes of shared memory: at most 227 KiB", shared);
  const char* lag = getenv("SLIMKV_HOST_LAG");
  if (!lag) lagging.group = 0;
  else if (sscanf(lag, "%d,%d", &lagging.group, &lagging.which) != 2) return refuse("SLIMKV_HOST_LAG=%s", lag);
  if (!stacks) stacks = static_cast<u8*>(aligned_alloc(4096, (size_t)MOST_THREADS * STACK_BYTES));
  size_t allocated = ((size_t)shared + 2 * GUARD_BYTES + 1023) / 1024 * 1024;
  u8* const memory = static_cast<u8*>(aligned_alloc(1024, allocated));
  machine.shared = memory + GUARD_BYTES;
  machine.shared_bytes = shared;
  machine.count = threads;
  machine.grid_x = x;
  machine.grid_y = y;
  machine.kernel = kernel;
  machine.args = args;
  machine.failed = false;
  bool fine = true;
  for (machine.block_y = 0; fine && machine.block_y < y; machine.block_y++)
    for (machine.block_x = 0; fine && machine.block_x < x; machine.block_x++) fine = run_block();
  free(memory);
  machine.shared = nullptr;
  return fine ? 0 : 1;
}

// Waits until the other lanes of the warp reach the same collective; returns all operands, [32][8].
typedef u64 (*Operands)[8];
static Operands meet(const char* where, const u64* mine, int n) {
  int i = machine.current;
  Thread& t = machine.threads[i];
  Operands all = machine.operands[t.meetings++ & 1];
  for (int k = 0; k < n; k++) all[i][k] = mine[k];
  t.where = where;
  t.state = AT_WARP;
  to_scheduler();
  return all + i / 32 * 32;
}
static int lane() { return machine.current % 32; }

template <class T> static T from_lane(const char* where, T x, int source) {
  u64 mine = 0;
  memcpy(&mine, &x, sizeof(T));
  Operands all = meet(where, &mine, 1);
  memcpy(&x, &all[source & 31][0], sizeof(T));
  return x;
}

static void land(int pending_groups) {
  Thread& t = machine.threads[machine.current];
  size_t n = 0;
  for (size_t i = 0; i < t.copies.count; i++) {
    const Copy c = t.copies.items[i];
    if (c.group < t.groups - pending_groups) memcpy(c.to, c.from, c.bytes);
    else t.copies.items[n++] = c;
  }
  t.copies.count = n;
}
static void begin_copy(void* to, const void* from, int bytes) {
  u64 offset = static_cast<u8*>(to) - machine.shared;
  if (offset + bytes > (u64)machine.shared_bytes) fail("an asynchronous copy to beyond shared memory");
  if (((u64)to | (u64)from) % bytes) fail("an asynchronous copy that is not aligned to its %d bytes", bytes);
  memset(to, POISON, bytes);
  machine.threads[machine.current].copies.push_back({to, from, bytes, machine.threads[machine.current].groups});
}

template <int A_SIGNED, int B_SIGNED>
static void mma_8(const char* where, i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u64 mine[6] = {a0, a1, a2, a3, b0, b1};
  Operands all = meet(where, mine, 6);
  int g = lane() / 4, t = lane() % 4;
  for (int n = 0; n < 4; n++) {
    u32 sum = (u32)c[n];
    for (int k = 0; k < 32; k++) {  // lane k / 4 % 4 of a row holds bytes k % 4, the upper 16 in its second register
      u8 a = (u8)(all[4 * g + k / 4 % 4][k / 16 * 2 + n / 2] >> (8 * (k % 4)));
      u8 b = (u8)(all[4 * (2 * t + n % 2) + k / 4 % 4][4 + k / 16] >> (8 * (k % 4)));
      sum += (u32)((A_SIGNED ? (int)(signed char)a : (int)a) * (B_SIGNED ? (int)(signed char)b : (int)b));
    }
    c[n] = (i32)sum;
  }
}

}  // namespace host

DEVICE int thread_index() { return host::machine.current; }
DEVICE int read_laneid() { return host::machine.current & 31; }
DEVICE int block_index() { return host::machine.block_x; }
DEVICE int block_index_y() { return host::machine.block_y; }
DEVICE int block_count() { return host::machine.grid_x; }
DEVICE void sync_threads() {
  host::Thread& t = host::machine.threads[host::machine.current];
  t.where = "sync_threads";
  t.state = host::AT_BLOCK;
  host::to_scheduler();
}
DEVICE void sync_warp() { host::meet("sync_warp", nullptr, 0); }
DEVICE bool team_any(bool p, int number, int threads) {
  if (number < 1 || number > 15) host::fail("there is no barrier %d", number);
  host::Team& team = host::machine.teams[number];
  const u64 generation = team.generation;
  team.any = team.any || p;
  if (++team.arrived == threads) team = {0, false, team.any, generation + 1};
  for (int polls = 0; team.generation == generation; polls++) {
    if (polls > 1000000) host::fail("waits for its team for ever");
    host::to_scheduler();  // stays runnable and polls again
  }
  return team.result;
}
DEVICE void sync_team(int number, int threads) { team_any(false, number, threads); }

DEVICE float as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
DEVICE u32 as_bits(float x) { u32 r; memcpy(&r, &x, 4); return r; }

DEVICE u32 prmt(u32 a, u32 b, u32 s) {
  u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = s >> (4 * i) & 15, byte = (u32)(bytes >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}

DEVICE u32 bit_select(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }

DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float div_rn_normal(float a, float b) { return div_rn(a, b); }
DEVICE float sqrt_rn_normal(float a) { return sqrtf(a); }
DEVICE float i32_to_f32_rn(i32 x) { return (float)x; }
DEVICE float i64_to_f32_rn(i64 x) { return (float)x; }
DEVICE i32 f32_to_i32_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return (i32)x;
}
DEVICE u32 ceil_product(float a, float b, int zero) { return (u32)(i64)(ceil(ldexp((double)a * (double)b, 149)) + zero); }
DEVICE u32 ceil_product_or_zero(float a, float b, int zero) {
  const double cell = ceil(ldexp((double)a * (double)b, 149)) + zero;
  return cell > 0 ? (u32)(i64)cell : 0;
}
DEVICE float floor_of(float x) { return floorf(x); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE int min_i32(int a, int b) { return a < b ? a : b; }
DEVICE int max_i32(int a, int b) { return a > b ? a : b; }
DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

DEVICE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
DEVICE float exp2_approx(float x) { return flushed(exp2f(flushed(x))); }
DEVICE float log2_approx(float x) { return flushed(log2f(flushed(x))); }
DEVICE float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }

DEVICE float f16_to_f32(u32 bits) {
  u32 sign = bits >> 15 & 1, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? as_float((exponent + 112) << 23 | mantissa << 13)
                           : (float)mantissa * 5.9604644775390625e-8f;
  return sign ? -x : x;
}
DEVICE u32 f32_to_f16(float x) {
  u32 bits = as_bits(x), sign = bits >> 16 & 0x8000, m = bits & 0x7FFFFFFF;
  if (m > 0x7F800000) return 0x7FFF;
  if (m >= 0x477FF000) return sign | 0x7C00;  // 65520 and more round to infinity
  if (m < 0x38800000)  // below 2^-14: adding a half makes the float's last bit 2^-24
    return sign | (as_bits(as_float(m) + 0.5f) - as_bits(0.5f));
  return sign | ((m + 0xFFF + (m >> 13 & 1) - 0x38000000) >> 13);
}
DEVICE u32 pack_f16x2(float low, float high) { return f32_to_f16(low) | f32_to_f16(high) << 16; }
DEVICE u32 f32_to_bf16(float x) {
  u32 bits = as_bits(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16x2(float low, float high) { return f32_to_bf16(low) | f32_to_bf16(high) << 16; }
DEVICE float e4m3_to_f32(u32 bits) {
  const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7F) == 0x7F) return NAN;
  const float x = exponent ? ldexpf(8.0f + mantissa, (int)exponent - 10) : ldexpf((float)mantissa, -9);
  return bits & 0x80 ? -x : x;
}
DEVICE u32 f32_to_e4m3(float x) {
  const u32 bits = as_bits(x), sign = bits >> 24 & 0x80, m = bits & 0x7FFFFFFF;
  if (m > 0x7F800000) return 0x7F;
  if (m >= 0x43E00000) return sign | 0x7E;                               // 448 and more
  if (m < 0x3C800000) return sign | (u32)rintf(as_float(m) * 512.0f);    // below 2^-6, in steps of 2^-9
  const u32 rounded = (m + 0x7FFFF + (m >> 20 & 1) - (120u << 23)) >> 20;
  return sign | (rounded < 0x7E ? rounded : 0x7E);
}
DEVICE u32 pack_e4m3x2(float low, float high) { return f32_to_e4m3(low) | f32_to_e4m3(high) << 8; }
DEVICE u32 pack_e4m3x4(float a, float b, float c, float d) { return pack_e4m3x2(a, b) | pack_e4m3x2(c, d) << 16; }
DEVICE u32 unpack_e4m3x2(u32 x) { return pack_f16x2(e4m3_to_f32(x & 0xFF), e4m3_to_f32(x >> 8 & 0xFF)); }
// Elementwise, the larger magnitude, with the product of the signs.
template <class F> DEVICE u32 larger_pairs(u32 a, u32 b, F to_float) {
  u32 r = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    u32 x = a >> shift & 0x7FFF, y = b >> shift & 0x7FFF;
    float fx = to_float(x), fy = to_float(y);
    r |= (fx != fx || fy != fy ? 0x7FFFu : fx > fy ? x : y) << shift;
  }
  return r | ((a ^ b) & 0x80008000u);
}
DEVICE float bf16_to_f32(u32 x) { return as_float(x << 16); }
DEVICE u32 max_abs_f16x2(u32 a, u32 b) { return larger_pairs(a, b, f16_to_f32); }
DEVICE u32 max_abs_bf16x2(u32 a, u32 b) { return larger_pairs(a, b, bf16_to_f32); }
template <class G> DEVICE u32 times_pairs(u32 a, u32 b, float to_float(u32), G from_float) {
  return from_float(to_float(a & 0xFFFF) * to_float(b & 0xFFFF)) | from_float(to_float(a >> 16) * to_float(b >> 16)) << 16;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) { return times_pairs(a, b, f16_to_f32, f32_to_f16); }
DEVICE u32 mul_bf16x2(u32 a, u32 b) { return times_pairs(a, b, bf16_to_f32, f32_to_bf16); }
DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (low & 0xFFFF) | (high & 0xFFFF0000u);
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {  // products of halves are exact in float32
  auto one = [&](int i) { return f16_to_f32(a >> i & 0xFFFF) * f16_to_f32(b >> i & 0xFFFF) + f16_to_f32(c >> i & 0xFFFF); };
  return pack_f16x2(one(0), one(16));
}
DEVICE u32 sub_bf16x2(u32 a, u32 b) {  // a difference is exact in float32, or far from a tie
  return pack_bf16x2(bf16_to_f32(a & 0xFFFF) - bf16_to_f32(b & 0xFFFF), bf16_to_f32(a >> 16) - bf16_to_f32(b >> 16));
}
DEVICE u32 sub_f16x2(u32 a, u32 b) {  // a difference of two halves is exact in float32, or far from a tie
  return pack_f16x2(f16_to_f32(a & 0xFFFF) - f16_to_f32(b & 0xFFFF), f16_to_f32(a >> 16) - f16_to_f32(b >> 16));
}

template <class T> DEVICE T shfl_xor(T x, int mask) { return host::from_lane("shfl_xor", x, host::lane() ^ mask); }
template <class T> DEVICE T shfl(T x, int lane) { return host::from_lane("shfl", x, lane); }
DEVICE bool warp_any(bool p) {
  u64 mine = p;
  host::Operands all = host::meet("warp_any", &mine, 1);
  for (int i = 0; i < 32; i++) mine |= all[i][0];
  return mine;
}
DEVICE u32 warp_sum(u32 x) {
  u64 mine = x;
  host::Operands all = host::meet("warp_sum", &mine, 1);
  u32 sum = 0;
  for (int i = 0; i < 32; i++) sum += (u32)all[i][0];
  return sum;
}
DEVICE u32 warp_max(u32 x) {
  u64 mine = x;
  host::Operands all = host::meet("warp_max", &mine, 1);
  for (int i = 0; i < 32; i++) x = (u32)all[i][0] > x ? (u32)all[i][0] : x;
  return x;
}
DEVICE u32 warp_ballot(bool p) { return warp_sum((u32)p << host::lane()); }
DEVICE int bit_count(u32 x) { return __builtin_popcount(x); }

DEVICE u32 movmatrix_trans(u32 x) {
  u64 mine = x;
  host::Operands all = host::meet("movmatrix_trans", &mine, 1);
  int r = host::lane() / 4, c = host::lane() % 4;
  u32 low = (u32)(all[4 * (2 * c) + r / 2][0] >> (16 * (r % 2))) & 0xFFFF;
  u32 high = (u32)(all[4 * (2 * c + 1) + r / 2][0] >> (16 * (r % 2))) & 0xFFFF;
  return low | high << 16;
}

DEVICE void ldmatrix_x4(u32 (&m)[4], u32 address) {
  u64 mine = address;
  host::Operands all = host::meet("ldmatrix_x4", &mine, 1);
  for (int i = 0; i < 4; i++) {
    const u32 from = (u32)all[8 * i + host::lane() / 4][0];
    if (from % 16 || from + 16 > (u32)host::machine.shared_bytes) host::fail("a matrix beyond shared memory, or not aligned");
    memcpy(&m[i], host::machine.shared + from + 4 * (host::lane() % 4), 4);
  }
}
DEVICE void ldmatrix_x4_trans(u32 (&m)[4], u32 address) {
  ldmatrix_x4(m, address);
  for (int i = 0; i < 4; i++) m[i] = movmatrix_trans(m[i]);
}

DEVICE u32 high_half(u32 x) { return x >> 16; }
DEVICE u32 dp4a_u8(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
DEVICE i32 dp4a_u8_s8(u32 a, u32 b, i32 c) {
  for (int i = 0; i < 32; i += 8) c += (int)(a >> i & 255) * (int)(signed char)(b >> i);
  return c;
}
DEVICE i32 dp4a_s8(u32 a, u32 b, i32 c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
  return c;
}

DEVICE void mma_u8_s8(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma_8<0, 1>("mma_u8_s8", c, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_s8_s8(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma_8<1, 1>("mma_s8_s8", c, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_s8_u8(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma_8<1, 0>("mma_s8_u8", c, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_u8_u8(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  host::mma_8<0, 0>("mma_u8_u8", c, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_u8_s8_from_zero(i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (i32& x : d) x = 0;
  mma_u8_s8(d, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_u8_u8_from_zero(i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (i32& x : d) x = 0;
  mma_u8_u8(d, a0, a1, a2, a3, b0, b1);
}
DEVICE i32 ld_acquire(const i32* p) { return *p; }
DEVICE void add_relaxed(i32* p, i32 x) { *p += x; }
DEVICE void fence_device() {}
DEVICE void sleep_ns(u32) {}
DEVICE void griddepcontrol_launch_dependents() {}
DEVICE void griddepcontrol_wait() { host::machine.threads[host::machine.current].waited = true; }
DEVICE void prefetch_l2(const void*) {}
DEVICE u32 in_register(u32 x, int lane) { return x; }
DEVICE void overwrite(float& x, float to) { x = to; }
DEVICE void stay(bool always) { if (!always) host::fail("a way out was taken"); }
// Products are exact, and their sum is rounded once; a device may round or truncate in between.
template <class F> DEVICE void mma_floats(const char* name, F to_float, float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u64 mine[6] = {a0, a1, a2, a3, b0, b1};
  host::Operands all = host::meet(name, mine, 6);
  int g = host::lane() / 4, t = host::lane() % 4;
  for (int n = 0; n < 4; n++) {
    double sum = c[n];
    for (int k = 0; k < 16; k++) {
      u32 a = (u32)(all[4 * g + k / 2 % 4][k / 8 * 2 + n / 2] >> (16 * (k % 2))) & 0xFFFF;
      u32 b = (u32)(all[4 * (2 * t + n % 2) + k / 2 % 4][4 + k / 8] >> (16 * (k % 2))) & 0xFFFF;
      sum += (double)to_float(a) * (double)to_float(b);
    }
    c[n] = (float)sum;
  }
}
DEVICE void mma_f16(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_floats("mma_f16", f16_to_f32, c, a0, a1, a2, a3, b0, b1); }
DEVICE void mma_f16_from_zero(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = 0;
  mma_f16(d, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma_bf16(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_floats("mma_bf16", bf16_to_f32, c, a0, a1, a2, a3, b0, b1); }
DEVICE void mma_bf16_from_zero(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = 0;
  mma_bf16(d, a0, a1, a2, a3, b0, b1);
}
DEVICE u32 shared_address(const void* p) { return (u32)(static_cast<const u8*>(p) - host::machine.shared); }
template <int OFFSET = 0> DEVICE u32 ld_shared_constant(u32 address) {
  address += OFFSET;
  u32 x;
  if (address % 4 || address + 4 > (u32)host::machine.shared_bytes) host::fail("a load beyond shared memory, or not aligned");
  memcpy(&x, host::machine.shared + address, 4);
  return x;
}
DEVICE Words4 ld_shared_constant_16(u32 address) {
  Words4 words;
  if (address % 16 || address + 16 > (u32)host::machine.shared_bytes) host::fail("words beyond shared memory");
  memcpy(&words, host::machine.shared + address, 16);
  return words;
}
DEVICE u32 settled(u32 address) { return address; }
DEVICE u32 ld_shared_constant_half(u32 address) {
  u16 x;
  if (address % 2 || address + 2 > (u32)host::machine.shared_bytes) host::fail("a load beyond shared memory, or not aligned");
  memcpy(&x, host::machine.shared + address, 2);
  return x;
}
template <int OFFSET> DEVICE void st_shared_words4(u32 address, const Words4& x) {
  address += OFFSET;
  if (address % 16 || address + 16 > (u32)host::machine.shared_bytes) host::fail("a store beyond shared memory, or not aligned");
  memcpy(host::machine.shared + address, &x, 16);
}
DEVICE void cp_async_4(void* shared, const void* global) { host::begin_copy(shared, global, 4); }
DEVICE void cp_async_16(void* shared, const void* global) { host::begin_copy(shared, global, 16); }
template <int OFFSET> DEVICE void cp_async_16_behind(u32 shared, const void* global) {
  host::begin_copy(host::machine.shared + shared + OFFSET, static_cast<const u8*>(global) + OFFSET, 16);
}
DEVICE void cp_async_16_or_zero(bool real, void* shared, const void* global) {
  static const Words4 zeros = {0, 0, 0, 0};
  cp_async_16(shared, real ? global : &zeros);
}
DEVICE void cp_async_commit() { host::machine.threads[host::machine.current].groups++; }
template <int GROUPS> DEVICE void cp_async_wait() { host::land(GROUPS); }
DEVICE Words4 ldg_streaming(const void* p) {
  if ((u64)p % 16) host::fail("a load of 16 bytes that is not aligned");
  Words4 r;
  memcpy(&r, p, 16);
  return r;
}
DEVICE Words4 ldg_cached(const void* p) { return ldg_streaming(p); }
DEVICE u32 ldg_word(const void* p) { u32 x; memcpy(&x, p, 4); return x; }
DEVICE i32 ldg_i32(const i32* p) { return *p; }

