// The codes of one 16-token tile, from the bytes of a page in shared memory to operands of the tensor cores.
// Lanes, slices, planes and value numbers are those of docs/page-format.md.
#pragma once
#include "intrinsics.cuh"

enum Kind { LLOYD = 0, UNIFORM = 1, FP8 = 2 };

constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// 2^16, 2^30, 2^31 and 2^29, unknown to the compiler: the high word of a product with one of them is a shift by 16, 2, 1
// or 3 that leaves the logic units, which unpacking keeps busiest, to others.
struct Powers { u32 by_16, by_2, by_1, by_3; };

DEVICE u32 shift_right(u32 x, int n, const Powers& powers) {
  if (n == 16) return high_product(x, powers.by_16);
  if (n == 2) return high_product(x, powers.by_2);
  if (n == 1) return high_product(x, powers.by_1);
  if (n == 3) return high_product(x, powers.by_3);
  return x >> n;
}

// A plane of W <= 4 bits of a side with S slices: whole words in fragment order, then token rows for what is left over.
template <int W, int S> struct Plane {
  static constexpr int PER_WORD = 4 / W;
  static constexpr int WORDS = S / PER_WORD;
  static constexpr int TAIL = S % PER_WORD;
  static constexpr int BYTES = 32 * S * W;
  u32 words[at_least_one(WORDS)];

  DEVICE_MEMBER void load(const u8* plane, int lane) { load_words<WORDS>(plane, lane, words); }

  // Value n of slice s in the low W bits of nibble n.
  template <bool TRANSPOSED>
  DEVICE_MEMBER u32 nibbles(const u8* plane, int lane, int s, const Powers& powers) const {
    if (s < WORDS * PER_WORD) {
      const u32 w = words[s / PER_WORD];
      if (W == 4) return w;
      return shift_right(w, W * (s % PER_WORD), powers) & (W == 2 ? 0x33333333u : 0x11111111u);
    }
    const u8* rows = plane + WORDS * 128;
    const int g = lane >> 2, t = lane & 3, row_bytes = 2 * W * TAIL;
    u32 out = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int token = TRANSPOSED ? 2 * t + 8 * (n / 4) + (n / 2) % 2 : g + 8 * (n / 4);
      int dim = TRANSPOSED ? g + 8 * (n % 2) : 2 * t + 8 * ((n / 2) % 2) + n % 2;
      int bit = W * (16 * (s - WORDS * PER_WORD) + dim);
      out |= ((u32)(rows[token * row_bytes + bit / 8] >> (bit % 8)) & ((1u << W) - 1)) << (4 * n);
    }
    return out;
  }

  template <int N> DEVICE_MEMBER static void load_words(const u8* plane, int lane, u32 (&w)[at_least_one(N)]) {
    constexpr int QUADS = N & ~3, PAIRS = N & ~1;
#pragma unroll
    for (int i = 0; i < QUADS; i += 4) {
      Words4 x = *(const Words4*)(plane + 16 * (32 * (i / 4) + lane));
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
    if (PAIRS > QUADS) {
      Words2 x = *(const Words2*)(plane + 128 * QUADS + 8 * lane);
      w[QUADS] = x.x, w[QUADS + 1] = x.y;
    }
    if (N > PAIRS) w[PAIRS] = *(const u32*)(plane + 128 * PAIRS + 4 * lane);
  }
};

// All planes of a tile's codes. low(s) and high(s): up to 4 bits, nibble n of low is code n; 5-7 bits, low nibbles and
// what is above them; 8 bits, the bytes of codes 0-3 and 4-7.
template <int BITS, int S, bool TRANSPOSED> struct Codes {
  static_assert(BITS >= 1 && BITS <= 7, "bits");
  static constexpr int FIRST = BITS >= 4 ? 4 : (BITS >= 2 ? 2 : 1);
  static constexpr int REST = BITS - FIRST;  // 0..3: a plane of 2 and/or one of 1
  Plane<FIRST, S> first;
  Plane<2, S> two;
  Plane<1, S> one;
  const u8* base;
  int lane;

  DEVICE_MEMBER void load(const u8* tile, int lane_) {
    base = tile, lane = lane_;
    first.load(base, lane);
    if (REST >= 2) two.load(base + Plane<FIRST, S>::BYTES, lane);
    if (REST & 1) one.load(base + one_offset(), lane);
  }
  DEVICE_MEMBER static constexpr int one_offset() { return Plane<FIRST, S>::BYTES + (REST >= 2 ? Plane<2, S>::BYTES : 0); }

  DEVICE_MEMBER u32 low(int s, const Powers& powers) const {
    u32 x = first.template nibbles<TRANSPOSED>(base, lane, s, powers);
    if (BITS == 3) x |= one.template nibbles<TRANSPOSED>(base + one_offset(), lane, s, powers) << 2;
    return x;
  }
  DEVICE_MEMBER u32 high(int s, const Powers& powers) const {
    u32 x = 0;
    if (BITS > 4 && REST >= 2) x = two.template nibbles<TRANSPOSED>(base + Plane<FIRST, S>::BYTES, lane, s, powers);
    if (BITS > 4 && (REST & 1)) x |= one.template nibbles<TRANSPOSED>(base + one_offset(), lane, s, powers) << (REST >= 2 ? 2 : 0);
    return x;
  }
};

template <int S, bool TRANSPOSED> struct Codes<8, S, TRANSPOSED> {
  u32 words[2 * S];
  DEVICE_MEMBER void load(const u8* tile, int lane) { Plane<4, 2 * S>::template load_words<2 * S>(tile, lane, words); }
  DEVICE_MEMBER u32 low(int s, const Powers&) const { return words[2 * s]; }
  DEVICE_MEMBER u32 high(int s, const Powers&) const { return words[2 * s + 1]; }
};

// ---- bytes for the integer tensor cores --------------------------------------------------------------------------

// Codes that are turned into bytes: Lloyd-Max levels of up to 4 bits, whose levels are odd halves of at most 63.5, and
// uniform codes.
template <int KIND, int BITS> constexpr bool in_bytes() { return KIND == UNIFORM || (KIND == LLOYD && BITS <= 4); }

// Two tables of four bytes. Up to 3 bits entry c is the byte of code c; at 4 bits it belongs to magnitude c and is
// completed by the sign.
struct Table { u32 low, high, signs; };  // signs: 0x80 in every byte

// Bytes of codes 0-3 and 4-7 of a slice, in 0..255. Lloyd-Max: level + 63.5.
template <int KIND, int BITS>
DEVICE void code_bytes(u32 low, u32 high, Table table, const Powers& powers, u32& first, u32& second) {
  if (BITS == 8) {
    first = low, second = high;
  } else if (BITS <= 3) {
    first = prmt(table.low, table.high, low);
    second = prmt(table.low, table.high, shift_right(low, 16, powers));
  } else if (KIND == LLOYD) {
    // The permutation's sign mode makes 0x80 or 0xFF of a clear or set sign bit.
    const u32 s = low & 0x77777777u, signs = table.signs;
    first = prmt(table.low, table.high, s) ^ prmt(signs, signs, low);
    second = prmt(table.low, table.high, shift_right(s, 16, powers)) ^ prmt(signs, signs, shift_right(low, 16, powers));
  } else {
    u32 even = low & 0x0F0F0F0Fu, odd = (low >> 4) & 0x0F0F0F0Fu;
    if (BITS > 4) even |= (high & 0x0F0F0F0Fu) << 4, odd |= high & 0xF0F0F0F0u;
    first = prmt(even, odd, 0x5140);
    second = prmt(even, odd, 0x7362);
  }
}

// ---- halves -------------------------------------------------------------------------------------------------------

template <int BITS> DEVICE u32 code_at(u32 low, u32 high, int n) {
  if (BITS == 8) return ((n < 4 ? low : high) >> (8 * (n & 3))) & 0xFF;
  return ((low >> (4 * n)) & 0xF) | (((high >> (4 * n)) & 0xF) << 4);
}

// What `code_halves` adds to every number. A byte behind fp16's 0x64 is 1024 + the byte; keys keep that, and it comes off
// their score. Values are summed over many tokens, so they are centred, but for half a unit.
template <int KIND, int BITS, bool TRANSPOSED> constexpr float half_offset() {
  return !in_bytes<KIND, BITS>() ? 0.0f
         : KIND == LLOYD         ? (TRANSPOSED ? 0.5f : 1087.5f)
                                 : (TRANSPOSED ? -(float)(1 << (BITS - 1)) : 1024.0f);
}

// The numbers of a slice as an operand: pairs (0, 1), (4, 5), (2, 3), (6, 7) for keys, (0, 2), (1, 3), (4, 6), (5, 7) for
// values. Lloyd-Max of more than 4 bits: from a table in shared memory with a copy for each lane, so that lanes never wait
// for one another. FP8: behind fp16's exponent the bits of e4m3 are the number over 256.
template <int KIND, int BITS, bool TRANSPOSED>
DEVICE void code_halves(u32 low, u32 high, Table table, const Powers& powers, const u32* levels, int lane, u32 (&a)[4]) {
  if (in_bytes<KIND, BITS>()) {
    u32 first, second;
    code_bytes<KIND, BITS>(low, high, table, powers, first, second);
    const u32 base = 0x64646464u;
    if (TRANSPOSED) {
      const u32 centre = KIND == LLOYD ? 0x643F643Fu : (0x6400u + (1u << (BITS - 1))) * 0x10001u;
      a[0] = half2_sub(prmt(first, base, 0x4240), centre), a[1] = half2_sub(prmt(first, base, 0x4341), centre);
      a[2] = half2_sub(prmt(second, base, 0x4240), centre), a[3] = half2_sub(prmt(second, base, 0x4341), centre);
    } else {
      a[0] = prmt(first, base, 0x4140), a[2] = prmt(first, base, 0x4342);
      a[1] = prmt(second, base, 0x4140), a[3] = prmt(second, base, 0x4342);
    }
    return;
  }
  const int pairs[4][2] = {{0, TRANSPOSED ? 2 : 1}, {TRANSPOSED ? 1 : 4, TRANSPOSED ? 3 : 5},
                           {TRANSPOSED ? 4 : 2, TRANSPOSED ? 6 : 3}, {TRANSPOSED ? 5 : 6, 7}};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = pairs[i][0], n = pairs[i][1];
    if (KIND == FP8) {
      const u32 x = prmt(low, high, (u32)((m << 4) | (n << 12))) & 0xFF00FF00u;
      a[i] = (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u);
    } else {
      a[i] = prmt(levels[32 * code_at<BITS>(low, high, m) + lane], levels[32 * code_at<BITS>(low, high, n) + lane], 0x5410);
    }
  }
}

// ---- fields -------------------------------------------------------------------------------------------------------

constexpr u32 INVALID_FIELD = 0xFFFF;
constexpr float FIELD_UNIT = 1.5474250491067253e26f;  // 2^87

DEVICE u32 field_bits(const u8* fields, int token) { return *(const u16*)(fields + 2 * token); }
DEVICE float scale_of(u32 field) { return as_float(field << 13) * FIELD_UNIT; }
DEVICE float zero_of(u32 field) { return as_float(((field & 0x7FFF) << 14) | ((field & 0x8000) << 16)) * FIELD_UNIT; }
