// Replaces hopper.cuh on a CPU (see host.h). Products are computed when issued, and copies land when awaited; mbarriers
// count arrivals and bytes like the real ones, and waiting forever is an error.
#pragma once

namespace host {

constexpr int MOST_POLLS = 1 << 20;

struct Barrier {  // in the 8 bytes of the real one
  u16 count, left;
  i32 bytes_and_phase;  // bytes still to land, times 2, and the phase's parity
};
static_assert(sizeof(Barrier) == 8, "a barrier has 8 bytes");

struct Landing { void* to; const void* from; u32 bytes; u64* barrier; };
static List<Landing> landings;
struct Named { int arrived; u64 generation; };
static Named named[16];

static void settle(Barrier* b) {
  if (b->left == 0 && b->bytes_and_phase >> 1 == 0) b->bytes_and_phase ^= 1, b->left = b->count;
}

static void arrive(u64* barrier, i32 bytes) {
  Barrier* b = reinterpret_cast<Barrier*>(barrier);
  if (b->left == 0) fail("more arrivals at a barrier than it expects");
  b->bytes_and_phase += 2 * bytes;
  b->left--;
  settle(b);
}

static void land_one(u64* barrier) {
  for (size_t i = 0; i < landings.count; i++)
    if (landings.items[i].barrier == barrier) {
      const Landing l = landings.items[i];
      landings.erase(i);
      memcpy(l.to, l.from, l.bytes);
      Barrier* b = reinterpret_cast<Barrier*>(barrier);
      b->bytes_and_phase -= 2 * (i32)l.bytes;
      settle(b);
      return;
    }
}

static void let_others_run(const char* where, int& polls) {
  if (++polls > MOST_POLLS) fail("waits at %s for ever", where);
  to_scheduler();  // stays runnable and polls again
}

static int meet_named(int number, int threads) {
  if (number < 1 || number > 15) fail("there is no named barrier %d", number);
  if (++named[number].arrived == threads) named[number].arrived = 0, named[number].generation++;
  return number;
}

static u8 byte_at(u32 address) {
  address ^= (address >> 7 & 7) << 4;
  if (address >= (u32)machine.shared_bytes) fail("an operand beyond shared memory");
  return machine.shared[address];
}

static u32 half_at(u32 address) {
  address ^= (address >> 7 & 7) << 4;
  if (address + 2 > (u32)machine.shared_bytes) fail("an operand beyond shared memory");
  u16 bits;
  memcpy(&bits, machine.shared + address, 2);
  return bits;
}

// Element (row, k) of an operand with contiguous k, and (k, column) of one with contiguous columns.
static float number_of(u32 bits, bool bf16) { return bf16 ? as_float(bits << 16) : f16_to_f32(bits); }
static float side_by_side(u64 operand, int row, int k, bool bf16 = false) {
  const u32 start = (u32)(operand & 0x3FFF) << 4, groups = (u32)(operand >> 32 & 0x3FFF) << 4;
  return number_of(half_at(start + row / 8 * groups + row % 8 * 128 + 2 * k), bf16);
}
static float across(u64 operand, int k, int column) {
  const u32 start = (u32)(operand & 0x3FFF) << 4, groups = (u32)(operand >> 32 & 0x3FFF) << 4;
  const u32 apart = (u32)(operand >> 16 & 0x3FFF) << 4;
  return f16_to_f32(half_at(start + column / 64 * apart + k / 8 * groups + k % 8 * 128 + column % 64 * 2));
}

// Byte (row, k) of an operand with contiguous k.
static u8 byte_of(u64 operand, int row, int k) {
  const u32 start = (u32)(operand & 0x3FFF) << 4, groups = (u32)(operand >> 32 & 0x3FFF) << 4;
  return byte_at(start + row / 8 * groups + row % 8 * 128 + k);
}
// Bytes k of the rows g and g + 8 of an operand in fragments of 64 x 32.
static void byte_rows(Operands all, int g, u8 (&rows)[2][32]) {
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 32; k++) rows[r][k] = (u8)(all[4 * g + k / 4 % 4][k / 16 * 2 + r] >> (8 * (k % 4)));
}

}  // namespace host

DEVICE void mbarrier_init(u64* barrier, int count) {
  *reinterpret_cast<host::Barrier*>(barrier) = {(u16)count, (u16)count, 0};
  host::List<host::Landing>& all = host::landings;  // remains of a launch that failed
  for (size_t i = all.count; i-- > 0;)
    if (all.items[i].barrier == barrier) all.erase(i);
  for (host::Named& n : host::named) n = {0, 0};
}
DEVICE void fence_mbarrier_init() {}
DEVICE void mbarrier_arrive(u64* barrier) { host::arrive(barrier, 0); }
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) { host::arrive(barrier, (i32)bytes); }
DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
  int polls = 0;
  while (((u32)reinterpret_cast<host::Barrier*>(barrier)->bytes_and_phase & 1) == parity) {
    host::land_one(barrier);
    host::let_others_run("a barrier", polls);
  }
}
DEVICE void cp_async_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  const u64 offset = static_cast<u8*>(shared) - host::machine.shared;
  if (offset + bytes > (u64)host::machine.shared_bytes) host::fail("a copy to beyond shared memory");
  if ((offset | (u64)global | bytes) % 16) host::fail("a copy that is not aligned to 16 bytes");
  memset(shared, host::POISON, bytes);
  host::landings.push_back({shared, global, bytes, barrier});
}
DEVICE void fence_proxy_async() {}
DEVICE void fence_proxy_async_global() {}
template <int OFFSET, int COUNT = 4> DEVICE void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  u64 mine[5] = {address, m0, m1, m2, m3};
  host::Operands all = host::meet("stmatrix_x4", mine, 5);
  const int lane = host::lane();
  for (int m = 0; m < COUNT; m++) {
    const u32 to = (u32)all[8 * m + lane / 4][0] + OFFSET + 4 * (lane % 4), word = (u32)mine[1 + m];
    if (to % 4 || to + 4 > (u32)host::machine.shared_bytes) host::fail("a matrix beyond shared memory");
    memcpy(host::machine.shared + to, &word, 4);
  }
  host::meet("stmatrix_x4", nullptr, 0);
}
template <int OFFSET> DEVICE void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  stmatrix_x4<OFFSET>(address, movmatrix_trans(m0), movmatrix_trans(m1), movmatrix_trans(m2), movmatrix_trans(m3));
}
template <int OFFSET> DEVICE void stmatrix_x2_trans(u32 address, u32 m0, u32 m1) {
  stmatrix_x4<OFFSET, 2>(address, movmatrix_trans(m0), movmatrix_trans(m1), 0, 0);
}
DEVICE void bar_sync(int number, int threads) {
  const u64 generation = host::named[number].generation;
  host::meet_named(number, threads);
  int polls = 0;
  while (host::named[number].generation == generation) host::let_others_run("a named barrier", polls);
}
DEVICE void bar_arrive(int number, int threads) { host::meet_named(number, threads); }
template <int N> DEVICE void setmaxnreg_inc() {}
template <int N> DEVICE void setmaxnreg_dec() {}
DEVICE void wgmma_fence() { host::meet("wgmma_fence", nullptr, 0); }
DEVICE void wgmma_commit() {}
template <int GROUPS> DEVICE void wgmma_wait() { host::meet("wgmma_wait", nullptr, 0); }
template <int N> DEVICE void wgmma_fence_operand(float (&)[N]) {}
template <int N> DEVICE void wgmma_fence_operand(u32 (&)[N]) {}

template <int N, bool BF16> struct WgmmaOf {
  template <bool ADD = true> static void shared_a(float (&c)[N / 2], u64 a, u64 b) {
    multiply(c, shared_rows(a, false), b, false, ADD);
  }
  static void shared_a_across(float (&c)[N / 2], u64 a, u64 b) { multiply(c, shared_rows(a, false), b, true, true); }
  static void transposed_a(float (&c)[N / 2], u64 a, u64 b) { multiply(c, shared_rows(a, true), b, false, true); }
  template <bool ADD = true> static void register_a(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    multiply(c, fragment_rows(a0, a1, a2, a3), b, false, ADD);
  }
  static void register_a_across(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    multiply(c, fragment_rows(a0, a1, a2, a3), b, true, true);
  }

 private:
  struct Operand { float rows[2][16]; };  // rows g and g + 8 of a warp's 16
  static Operand shared_rows(u64 a, bool transposed) {
    const int first = 16 * (host::machine.current / 32 % 4) + host::lane() / 4;
    Operand x;
    for (int r = 0; r < 2; r++)
      for (int k = 0; k < 16; k++)
        x.rows[r][k] = transposed ? host::across(a, k, first + 8 * r) : host::side_by_side(a, first + 8 * r, k, BF16);
    return x;
  }
  static Operand fragment_rows(u32 a0, u32 a1, u32 a2, u32 a3) {
    u64 mine[4] = {a0, a1, a2, a3};
    host::Operands all = host::meet("register_a", mine, 4);
    Operand x;
    for (int r = 0; r < 2; r++)
      for (int k = 0; k < 16; k++)
        x.rows[r][k] = host::number_of(
            (u32)(all[host::lane() / 4 * 4 + k / 2 % 4][k / 8 * 2 + r] >> (16 * (k % 2))) & 0xFFFF, BF16);
    return x;
  }
  static void multiply(float (&c)[N / 2], const Operand& a, u64 b, bool across, bool add) {
    for (int i = 0; i < N / 2; i += 4)
      for (int j = 0; j < 2; j++) {
        const int n = 2 * i + 2 * (host::lane() % 4) + j;
        float column[16];
        for (int k = 0; k < 16; k++) column[k] = across ? host::across(b, k, n) : host::side_by_side(b, n, k, BF16);
        for (int r = 0; r < 2; r++) {
          double sum = add ? c[i + 2 * r + j] : 0.0;
          for (int k = 0; k < 16; k++) sum += (double)a.rows[r][k] * column[k];
          c[i + 2 * r + j] = (float)sum;
        }
      }
  }
};
template <int N, bool BF16> using WgmmaNarrow = WgmmaOf<N, BF16>;
template <int N> struct Wgmma : WgmmaOf<N, false> {
  static void register_a(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WgmmaOf<N, false>::register_a_across(c, a0, a1, a2, a3, b);
  }
};

template <int N> struct WgmmaBytes {
  template <bool ADD> static void s8(u32 (&c)[N / 2], u64 a, u64 b) {
    const int lane = host::lane(), warp = host::machine.current / 32 % 4;
    for (int i = 0; i < N / 2; i++) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 2 * (i / 4 * 4) + 2 * (lane % 4) + i % 2;
      u32 sum = ADD ? c[i] : 0;
      for (int k = 0; k < 32; k++)
        sum += (u32)((int)(signed char)host::byte_of(a, row, k) * (signed char)host::byte_of(b, column, k));
      c[i] = sum;
    }
  }
  // The tensor cores of sm_90 align all products and the accumulator to the largest exponent among them, and drop all
  // bits below the 14th of each before they add them up.
  static void e4m3(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    each("e4m3", a0, a1, a2, a3, b, [&](int at, const u8* row, const u8* column) {
      float terms[33], largest = 0.0f;
      for (int k = 0; k < 32; k++) terms[k] = e4m3_to_f32(row[k]) * e4m3_to_f32(column[k]);
      terms[32] = add ? c[at] : 0.0f;
      for (float x : terms) largest = !(fabsf(x) <= largest) ? fabsf(x) : largest;
      const float last = as_float(as_bits(largest) & 0x7F800000u) * (1.0f / 8192);
      float sum = 0.0f;
      for (float x : terms) sum += largest > 0.0f && largest < 1e30f ? truncf(x / last) * last : x;
      c[at] = sum;
    });
  }

 private:
  template <class F> static void each(const char* where, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, F product) {
    u64 mine[4] = {a0, a1, a2, a3};
    u8 rows[2][32], column[32];
    host::byte_rows(host::meet(where, mine, 4), host::lane() / 4, rows);
    for (int i = 0; i < N / 2; i += 4)
      for (int j = 0; j < 2; j++) {
        for (int k = 0; k < 32; k++) column[k] = host::byte_of(b, 2 * i + 2 * (host::lane() % 4) + j, k);
        for (int r = 0; r < 2; r++) product(i + 2 * r + j, rows[r], column);
      }
  }
};
