// Codes of a 16-token tile: from the bytes of a page to operands of the tensor cores.
// Lanes, slices, planes and value numbers are those of docs/design/page-format.md.
#pragma once
#include "common/token_rows.cuh"
#include "common/types.cuh"

constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// A plane of W <= 4 bits with S slices: whole words in fragment order, then token rows for the remaining slices, which
// become one more word. A lane loads all words, or one of PARTS parts: OF_PART slices, which are whole words or a
// fraction of one. If PARTS does not divide the slices, the last parts have fewer slices or none, and their unused bits
// are undefined.
template <int W, int S, bool TRANSPOSED, int PARTS = 1, int OF_PART = (S + PARTS - 1) / PARTS> struct Plane {
  static constexpr int PER_WORD = 4 / W;
  static constexpr bool FRACTION = PARTS > 1 && OF_PART < PER_WORD;
  static constexpr int WHOLE_WORDS = FRACTION ? 1 : OF_PART / PER_WORD, TAIL = S % PER_WORD,
                       WORDS = WHOLE_WORDS + (PARTS == 1 && TAIL > 0);
  static constexpr int BYTES = 32 * S * W;
  static_assert(PARTS == 1 || (FRACTION ? PER_WORD % OF_PART : OF_PART % PER_WORD) == 0, "no part is cut by a word");
  u32 words[WORDS];

  DEVICE_MEMBER void load(const u8* plane, int lane, int part) {
    if constexpr (PARTS == 1) {
      load_words<WHOLE_WORDS>(plane, lane, words);
      if constexpr (TAIL > 0) words[WHOLE_WORDS] = rows_word(plane, lane);
    } else if constexpr (S != PARTS * OF_PART || TAIL > 0) {
      load_uneven_part(plane, lane, part);
      if constexpr (FRACTION) words[0] >>= shift_of_part(part);
    } else if constexpr (FRACTION) {  // bits of other parts remain above this one's
      load_words_of_part<1, S / PER_WORD>(plane, lane, word_of_part(part), words);
      words[0] >>= shift_of_part(part);
    } else {
      load_words_of_part<WHOLE_WORDS, PARTS>(plane, lane, part, words);
    }
  }
  DEVICE_MEMBER static u32 rows_word(const u8* plane, int lane) {
    const u8* rows = plane + 128 * (S / PER_WORD);
    return TRANSPOSED ? value_rows_word<W, TAIL>(rows, lane) : key_rows_word<W, TAIL>(rows, lane);
  }
  // FRACTION: the word of a part, and the part's bit position in the nibbles.
  DEVICE_MEMBER static int word_of_part(int part) { return part / (PER_WORD / OF_PART); }
  DEVICE_MEMBER static int shift_of_part(int part) { return W * OF_PART * (part % (PER_WORD / OF_PART)); }

  // Parts stored as token rows are loaded by load_rows instead of `load`.
  static constexpr bool SOME_IN_ROWS = PARTS > 1 && TAIL > 0;
  static_assert(!SOME_IN_ROWS || WORDS == 1, "words and rows of a part");
  DEVICE_MEMBER static bool in_rows(int part) { return OF_PART * part >= S - TAIL; }
  DEVICE_MEMBER void load_rows(const u8* plane, int lane, int part) {
    words[0] = rows_word(plane, lane);
    if constexpr (FRACTION) words[0] >>= shift_of_part(part);
  }

  // Value n of slice s in the low W bits of nibble n.
  DEVICE_MEMBER u32 nibbles(int s) const {
    return W == 4 ? word_of(s) : word_of(s) >> shift_of(s) & (W == 2 ? 0x33333333u : 0x11111111u);
  }
  // The word with slice s, whose nibble n holds value n, and the slice's bit position in the nibbles.
  DEVICE_MEMBER u32 word_of(int s) const { return words[s / PER_WORD]; }
  DEVICE_MEMBER static constexpr int shift_of(int s) { return W * (s % PER_WORD); }

  template <int N, int M> DEVICE_MEMBER static void load_words(const u8* plane, int lane, u32 (&w)[M]) {
    constexpr int QUADS = N & ~3, PAIRS = N & ~1;
    UNROLL_FOR (int i = 0; i < QUADS; i += 4) {
      Words4 x = *(const Words4*)(plane + 16 * (32 * (i / 4) + lane));
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
    if (PAIRS > QUADS) {
      Words2 x = *(const Words2*)(plane + 128 * QUADS + 8 * lane);
      w[QUADS] = x.x, w[QUADS + 1] = x.y;
    }
    if (N > PAIRS) w[PAIRS] = *(const u32*)(plane + 128 * PAIRS + 4 * lane);
  }

  // Loads words N part, N part + 1, ... of a plane of N PARTS_ words.
  template <int N, int PARTS_> DEVICE_MEMBER static void load_words_of_part(const u8* plane, int lane, int part,
      u32 (&w)[N]) {
    if constexpr (N % 4 == 0) {
      load_words<N>(plane + 128 * N * part, lane, w);
    } else if constexpr (N == 2 && PARTS_ % 2 == 0) {
      const Words2 x = *(const Words2*)(plane + 512 * (part / 2) + 16 * lane + 8 * (part % 2));
      w[0] = x.x, w[1] = x.y;
    } else {
      UNROLL_FOR (int j = 0; j < N; j++) w[j] = *(const u32*)(plane + place_of_word<N * PARTS_>(N * part + j, lane));
    }
  }

  // The offset of word i of the ALL words of a lane.
  template <int ALL> DEVICE_MEMBER static int place_of_word(int i, int lane) {
    constexpr int QUADS = ALL & ~3, PAIRS = ALL & ~1;
    return i < QUADS ? 512 * (i / 4) + 16 * lane + 4 * (i % 4)
        : i < PAIRS  ? 128 * QUADS + 8 * lane + 4 * (i - QUADS)
                     : 128 * PAIRS + 4 * lane;
  }

  // For parts of unequal size. Loads two words at a time; an odd last word is loaded together with the next lane's.
  DEVICE_MEMBER void load_uneven_part(const u8* plane, int lane, int part) {
    constexpr int ALL = at_least_one(S / PER_WORD), LAST_PAIR = (ALL - 1) & ~1;
    if constexpr (WORDS % 2 == 0) {
      UNROLL_FOR (int j = 0; j < WORDS; j += 2) {
        const int i = min_i32(WORDS * part + j, LAST_PAIR);
        const bool alone = ALL % 2 && i == LAST_PAIR;
        const Words2 x = *(const Words2*)(plane + place_of_word<ALL>(i, alone ? lane & ~1 : lane));
        words[j] = alone && (lane & 1) ? x.y : x.x, words[j + 1] = x.y;
      }
    } else {
      UNROLL_FOR (int j = 0; j < WORDS; j++) {
        const int i = FRACTION ? word_of_part(part) : WORDS * part + j;
        words[j] = *(const u32*)(plane + place_of_word<ALL>(min_i32(i, ALL - 1), lane));
      }
    }
  }
};

template <class P> struct PlaneAt {
  P& plane;
  const u8* at;
};
// Loads a plane of N tiles. One branch on token rows serves all tiles, so that their loads overlap.
template <class P, int N, class Tile> DEVICE void load_plane_of_tiles(const Tile& tile, int lane, int part) {
  if constexpr (P::SOME_IN_ROWS)
    if (P::in_rows(part)) {
      UNROLL_FOR (int i = 0; i < N; i++) tile(i).plane.load_rows(tile(i).at, lane, part);
      return;
    }
  UNROLL_FOR (int i = 0; i < N; i++) tile(i).plane.load(tile(i).at, lane, part);
}

// All planes of a tile's codes. low(s) and high(s) return the codes of slice s. Up to 4 bits: nibble n of low is code
// n. 5-7 bits: nibbles n of low and high are its low four and its upper bits. 8 bits: the bytes are codes 0-3 and 4-7.
template <int BITS, int S, bool TRANSPOSED, int PARTS = 1> struct Codes {
  static_assert(BITS >= 1 && BITS <= 7, "bits");
  static constexpr int WIDTH = BITS;
  static constexpr bool VALUES = TRANSPOSED;
  static constexpr int FIRST = BITS >= 4 ? 4 : (BITS >= 2 ? 2 : 1);
  static constexpr int REST = BITS - FIRST;  // 0..3: a plane of 2 bits, of 1 bit, or both
  typedef Plane<FIRST, S, TRANSPOSED, PARTS> First;
  typedef Plane<2, S, TRANSPOSED, REST >= 2 ? PARTS : 1> Two;
  typedef Plane<1, S, TRANSPOSED, REST & 1 ? PARTS : 1> One;
  First first;
  Two two;
  One one;

  DEVICE_MEMBER void load(const u8* tile, int lane, int part = 0) {
    static_assert(!First::SOME_IN_ROWS && !Two::SOME_IN_ROWS && !One::SOME_IN_ROWS, "load_parts knows of rows");
    first.load(tile, lane, part);
    if (REST >= 2) two.load(tile + First::BYTES, lane, part);
    if (REST & 1) one.load(tile + First::BYTES + (REST >= 2 ? Two::BYTES : 0), lane, part);
  }
  // Loads one part of N tiles; tile i is at `tile(i)`.
  template <int N, class Tile> DEVICE_MEMBER static void load_parts(Codes* codes, const Tile& tile, int lane,
      int part) {
    constexpr int TWO = First::BYTES, ONE = TWO + (REST >= 2 ? Two::BYTES : 0);
    load_plane_of_tiles<First, N>([&](int i) { return PlaneAt<First>{codes[i].first, tile(i)}; }, lane, part);
    if constexpr (REST >= 2)
      load_plane_of_tiles<Two, N>([&](int i) { return PlaneAt<Two>{codes[i].two, tile(i) + TWO}; }, lane, part);
    if constexpr (REST & 1)
      load_plane_of_tiles<One, N>([&](int i) { return PlaneAt<One>{codes[i].one, tile(i) + ONE}; }, lane, part);
  }

  // Merges two tiles of values, up to 4 bits: dimensions g of both (ODD: g + 8), with the first tile's codes in even
  // nibbles and the second tile's in odd ones. Works on whole words of a plane, however many slices they hold.
  static constexpr bool MERGEABLE = BITS <= 4;
  template <bool ODD> DEVICE_MEMBER void merge(const Codes& a, const Codes& b) {
    UNROLL_FOR (int i = 0; i < First::WORDS; i++) first.words[i] = merged<ODD>(a.first.words[i], b.first.words[i]);
    if (REST & 1)
      UNROLL_FOR (int i = 0; i < One::WORDS; i++) one.words[i] = merged<ODD>(a.one.words[i], b.one.words[i]);
  }
  template <bool ODD> DEVICE_MEMBER static u32 merged(u32 a, u32 b) {
    return bit_select(0x0F0F0F0Fu, ODD ? a >> 4 : a, ODD ? b : b << 4);
  }

  DEVICE_MEMBER u32 low(int s) const {
    u32 x = first.nibbles(s);
    if (BITS == 3) x |= one.nibbles(s) << 2;
    return x;
  }
  DEVICE_MEMBER u32 high(int s) const {
    u32 x = 0;
    if (BITS > 4 && REST >= 2) x = two.nibbles(s);
    if (BITS > 4 && (REST & 1)) x |= one.nibbles(s) << (REST >= 2 ? 2 : 0);
    return x;
  }
  // 5-7 bits: the codes of even index (pair[0]) and odd index (pair[1]) as bytes. ANYTHING_ABOVE: at 6 bits, the
  // highest two bits are undefined, and the LUT has an entry for each of their values.
  template <bool ANYTHING_ABOVE> DEVICE_MEMBER void bytes(int s, u32 (&pair)[2]) const {
    const u32 nibbles = low(s), mask = 0x0F0F0F0Fu;
    if (ANYTHING_ABOVE && BITS == 6) {
      const u32 above = two.words[s / 2];
      pair[0] = bit_select(mask, nibbles, above << (s % 2 ? 2 : 4));
      pair[1] = bit_select(mask, nibbles >> 4, above >> (s % 2 ? 2 : 0));
    } else {
      const u32 above = high(s);
      pair[0] = bit_select(mask, nibbles, above << 4);
      pair[1] = bit_select(mask, nibbles >> 4, above);
    }
  }
  DEVICE_MEMBER static constexpr int word_of_byte(int n) { return n % 2; }
  DEVICE_MEMBER static constexpr int place_of_byte(int n) { return n / 2; }
  // 5 bits: the word with the signs, and their bit position in its nibbles.
  DEVICE_MEMBER u32 sign_word(int s) const { return one.word_of(s); }
  DEVICE_MEMBER static constexpr int sign_shift(int s) { return One::shift_of(s); }
};

template <int S, bool TRANSPOSED, int PARTS> struct Codes<8, S, TRANSPOSED, PARTS> {
  static constexpr int WIDTH = 8;
  static constexpr bool MERGEABLE = false;
  static constexpr bool VALUES = TRANSPOSED;
  Plane<4, 2 * S, TRANSPOSED, PARTS, 2 * ((S + PARTS - 1) / PARTS)> plane;
  DEVICE_MEMBER void load(const u8* tile, int lane, int part = 0) { plane.load(tile, lane, part); }
  template <int N, class Tile> DEVICE_MEMBER static void load_parts(Codes* codes, const Tile& tile, int lane,
      int part) {
    UNROLL_FOR (int i = 0; i < N; i++) codes[i].load(tile(i), lane, part);
  }
  DEVICE_MEMBER u32 low(int s) const { return plane.words[2 * s]; }
  DEVICE_MEMBER u32 high(int s) const { return plane.words[2 * s + 1]; }
  template <bool> DEVICE_MEMBER void bytes(int s, u32 (&pair)[2]) const { pair[0] = low(s), pair[1] = high(s); }
  DEVICE_MEMBER static constexpr int word_of_byte(int n) { return n / 4; }
  DEVICE_MEMBER static constexpr int place_of_byte(int n) { return n % 4; }
};

// ---- bytes for the integer tensor cores --------------------------------------------------------------------------

// Whether codes become bytes: Lloyd-Max of up to 4 bits, whose levels are odd multiples of 1/2 up to 63.5, and uniform.
template <int KIND, int BITS> constexpr bool in_bytes() { return KIND == UNIFORM || (KIND == LLOYD && BITS <= 4); }

// A table of eight bytes in two registers. Up to 3 bits, entry c is the byte of code c. At 4 bits, it is the byte of
// magnitude c, to which the sign is applied.
struct Table { u32 low, high, signs; };  // signs: 0x80 in every byte

// A LUT of levels in shared memory with one copy per lane, to avoid bank conflicts.
struct LevelTable {
  u32 address;  // this lane's first entry
  // The entry with the index in byte i of the word. Entries are 128 bytes apart, so the byte is multiplied by 128.
  DEVICE_MEMBER u32 at(u32 word, int i) const { return ld_shared_constant(dp4a_u8(word, 0x80u << (8 * i), address)); }
};

// The levels of codes 0-3 and 4-7 of a slice as unsigned bytes. Lloyd-Max: centroid + 63.5. BY_PRODUCT: shifts by 16
// run as multiplications, for kernels bound by the logic units.
template <int KIND, int BITS, bool BY_PRODUCT = false>
DEVICE void code_bytes(u32 low, u32 high, Table table, u32& first, u32& second) {
  auto upper = [](u32 x) { return BY_PRODUCT ? high_half(x) : x >> 16; };
  if (BITS == 8) {
    first = low, second = high;
  } else if (BITS <= 3) {
    first = prmt(table.low, table.high, low);
    second = prmt(table.low, table.high, upper(low));
  } else if (KIND == LLOYD) {
    // The permutation's sign mode turns a clear or set sign bit into 0x80 or 0xFF.
    const u32 s = low & 0x77777777u, signs = table.signs;
    first = prmt(table.low, table.high, s) ^ prmt(signs, signs, low);
    second = prmt(table.low, table.high, upper(s)) ^ prmt(signs, signs, upper(low));
  } else {
    u32 even = low & 0x0F0F0F0Fu, odd = (low >> 4) & 0x0F0F0F0Fu;
    if (BITS > 4) even |= (high & 0x0F0F0F0Fu) << 4, odd |= high & 0xF0F0F0F0u;
    first = prmt(even, odd, 0x5140);
    second = prmt(even, odd, 0x7362);
  }
}

// ---- halves -------------------------------------------------------------------------------------------------------

// The offset that `code_halves` adds to uniform codes: the fp16 number of bytes 0x64 and x is 1024 + x. Keys keep this
// offset, which is subtracted from their scores. Values are centred, because they are summed over many tokens.
template <int KIND, int BITS, bool TRANSPOSED> constexpr float half_offset() {
  return KIND != UNIFORM ? 0.0f : TRANSPOSED ? -(float)(1 << (BITS - 1)) : 1024.0f;
}
// The factor that turns the fp16 numbers of `code_halves` into levels.
template <int KIND, int BITS> constexpr float half_unit() { return KIND == FP8 ? 256.0f : 1.0f; }

// The values of a slice as an MMA operand: the pairs (0, 2), (1, 3), (4, 6), (5, 7); for keys, the middle two are
// swapped. Lloyd-Max of 6 bits and more: one LUT access per value (fewer bits: see below). FP8: the bits of e4m3,
// shifted to fp16's fields, are the value / 256.
template <int KIND, int BITS, bool TRANSPOSED, class Levels>
DEVICE void code_halves(u32 low, u32 high, Table table, const Levels& levels, u32 (&a)[4]) {
  constexpr int ODD = TRANSPOSED ? 1 : 2, NEXT = 3 - ODD;
  if (KIND == UNIFORM) {
    u32 first, second;
    code_bytes<KIND, BITS>(low, high, table, first, second);
    const u32 base = 0x64646464u;
    a[0] = prmt(first, base, 0x4240), a[ODD] = prmt(first, base, 0x4341);
    a[NEXT] = prmt(second, base, 0x4240), a[3] = prmt(second, base, 0x4341);
    if (TRANSPOSED)
      UNROLL_FOR (int i = 0; i < 4; i++) a[i] = sub_f16x2(a[i], (0x6400u + (1u << (BITS - 1))) * 0x10001u);
    return;
  }
  u32 bytes[2] = {low, high};  // codes 0-3 and 4-7 or, below 8 bits, even and odd codes
  if (BITS < 8) bytes[0] = bit_select(0x0F0F0F0Fu, low, high << 4), bytes[1] = bit_select(0x0F0F0F0Fu, low >> 4, high);
  auto level = [&](int n) { return BITS < 8 ? levels.at(bytes[n % 2], n / 2) : levels.at(bytes[n / 4], n % 4); };
  UNROLL_FOR (int i = 0; i < 4; i++) {
    const int m = (i & 1) + 4 * (i >> 1), n = m + 2;
    u32& to = a[i == 1 ? ODD : i == 2 ? NEXT : i];
    if (KIND == FP8) {
      const u32 x = prmt(low, high, (u32)((m << 4) | (n << 12))) & 0xFF00FF00u;
      to = (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u);
    } else to = prmt(level(m), level(n), 0x5410);
  }
}

// ---- halves by permutations ---------------------------------------------------------------------------------------

// Lloyd-Max of 4 bits, in the order of `code_halves`: twice the magnitude (from `table`) in the low byte and the sign
// in the high byte form a denormal number, 2^-23 times the centroid. This needs more logic than a LUT but no shared
// memory.
constexpr float DENORMAL_UNIT = 8388608.0f;
template <bool TRANSPOSED> DEVICE void denormal_halves(u32 low, Table table, u32 (&a)[4]) {
  constexpr int ODD = TRANSPOSED ? 1 : 2, NEXT = 3 - ODD;
  const u32 magnitudes = low & 0x77777777u;
  const u32 first = prmt(table.low, table.high, magnitudes),
            second = prmt(table.low, table.high, high_half(magnitudes));
  const u32 even = ~(low << 4) & 0x80808080u, odd = ~low & 0x80808080u;
  a[0] = prmt(first, even, 0x5240), a[ODD] = prmt(first, odd, 0x5341);
  a[NEXT] = prmt(second, even, 0x7260), a[3] = prmt(second, odd, 0x7361);
}
// Twice the magnitudes of levels, from the table entries of code_bytes.
DEVICE u32 doubled_magnitudes(u32 entries) { return (~entries & 0x3F3F3F3Fu) << 1 | 0x01010101u; }

// ---- halves by pairs ----------------------------------------------------------------------------------------------

// Lloyd-Max of up to 5 bits: a LUT with two centroids per entry. Entry b holds those of the two nibbles of b, the lower
// nibble's in its lower half. At 5 bits it holds magnitudes, and the fifth bits are the signs.
constexpr int PAIR_ENTRIES = 256;

// Moves the nibbles of a word so that pair p is in nibbles p and p + 4, 16 bits apart. The pairs are values 0 and 1, 2
// and 3, ..., or with ACROSS 0 and 2, 1 and 3, 4 and 6, 5 and 7.
template <bool ACROSS> DEVICE u32 pairs_apart(u32 x) {
  if (ACROSS) return prmt(x, 0, 0x3120);
  const u32 m = 0x000F000Fu, by_4 = x >> 4, by_8 = x >> 8;
  return prmt((x & m) | (by_4 & ~m), (by_4 & m) | (by_8 & ~m), 0x6420);
}

// Looks up the four pairs of a slice.
template <bool ACROSS, int BITS, int S, bool TRANSPOSED, int PARTS>
DEVICE void pair_halves(const Codes<BITS, S, TRANSPOSED, PARTS>& codes, int s, const LevelTable& levels,
    u32 (&pair)[4]) {
  static_assert(BITS <= 5, "an entry of the table has two nibbles");
  u32 low = codes.low(s);
  if (ACROSS) {  // swaps nibbles 1 and 2, and 5 and 6
    const u32 both = (low ^ low >> 4) & 0x00F000F0u;
    low = low ^ both ^ both << 4;
  }
  UNROLL_FOR (int p = 0; p < 4; p++) pair[p] = levels.at(low, p);
  if constexpr (BITS == 5) {
    const u32 signs = pairs_apart<ACROSS>(codes.sign_word(s));
    UNROLL_FOR (int p = 0; p < 4; p++) pair[p] ^= ~(signs << (15 - 4 * p - codes.sign_shift(s))) & 0x80008000u;
  }
}

// Looks up pairs of tokens, one from each of two tiles of values. Pair p of `even` holds values 2 p of both, and pair p
// of `odd` values 2 p + 1.
template <int BITS, int S, bool TRANSPOSED, int PARTS>
DEVICE void merged_pair_halves(const Codes<BITS, S, TRANSPOSED, PARTS>& a, const Codes<BITS, S, TRANSPOSED, PARTS>& b,
    int s, const LevelTable& levels, u32 (&even)[4], u32 (&odd)[4]) {
  static_assert(BITS <= 5, "an entry of the table has two nibbles");
  const u32 x = a.low(s), y = b.low(s), even_codes = bit_select(0x0F0F0F0Fu, x, y << 4),
            odd_codes = bit_select(0x0F0F0F0Fu, x >> 4, y);
  UNROLL_FOR (int p = 0; p < 4; p++) even[p] = levels.at(even_codes, p), odd[p] = levels.at(odd_codes, p);
  if constexpr (BITS == 5) {  // the two tiles' signs, 16 bits apart
    const u32 first = a.sign_word(s), second = b.sign_word(s),
              signs[2] = {prmt(first, second, 0x5410), prmt(first, second, 0x7632)};
    UNROLL_FOR (int p = 0; p < 4; p++) {
      const int shift = 15 - 8 * (p % 2) - a.sign_shift(s);
      even[p] ^= ~(signs[p / 2] << shift) & 0x80008000u;
      odd[p] ^= ~(signs[p / 2] << (shift - 4)) & 0x80008000u;
    }
  }
}

// ---- fields -------------------------------------------------------------------------------------------------------

constexpr float FIELD_UNIT = 1.5474250491067253e26f;  // 2^87

DEVICE u32 field_bits(const u8* fields, int token) { return *(const u16*)(fields + 2 * token); }
// In units of FIELD_UNIT.
DEVICE float small_scale_of(u32 field) { return as_float(field << 13); }
DEVICE float small_zero_of(u32 field) { return as_float(((field & 0x7FFF) << 14) | ((field & 0x8000) << 16)); }
DEVICE float scale_of(u32 field) { return small_scale_of(field) * FIELD_UNIT; }
DEVICE float zero_of(u32 field) { return small_zero_of(field) * FIELD_UNIT; }
