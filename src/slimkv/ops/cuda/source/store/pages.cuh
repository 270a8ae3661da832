// From codes in lanes to the bytes of pages: whole tiles as words, single tokens as the bytes that they own.
#pragma once
#include "store/format.cuh"

// The slots of the tile's tokens. Lanes k and k + 16 have token k's slot.
struct Slots {
  i64 slot;      // of the lane's token; negative: skip it
  i64 start;     // slot of the first token
  bool aligned;  // the 16 tokens are a tile of a page
};

template <class S> DEVICE Slots load_slots(const void* slots, int first, int tokens, int lane) {
  int token = first + (lane & 15);
  Slots s;
  s.slot = token < tokens ? (i64)((const S*)slots)[token] : -1;
  s.start = shfl(s.slot, 0);
  s.aligned = !warp_any(s.start < 0 || (s.start & 15) || s.slot != s.start + (lane & 15));
  return s;
}

template <int PAGE_TOKENS> DEVICE u8* page_of(u8* pages, i64 page_stride, i64 slot) {
  return pages + (slot > 0 ? (i64)((u64)slot / PAGE_TOKENS) : 0) * page_stride;
}

DEVICE u32 four_bytes(const u32* x) { return x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24; }
DEVICE void store_bytes(u8* at, u32 word, int bytes) {
  if (bytes == 4) *(u32*)at = word;
  else if (bytes == 2) *(u16*)at = (u16)word;
  else *at = (u8)word;
}

// Stores a lane's words of a plane that PARTS warps share; this warp has part `part`.
template <int PARTS, int WORDS> DEVICE void store_plane_words(u8* base, const u32 (&word)[WORDS], int lane, int part) {
  if constexpr (PARTS == 1) {
    constexpr int QUADS = WORDS & ~3, PAIRS = WORDS & ~1;
    UNROLL_FOR (int i = 0; i < QUADS; i += 4)
      *(Words4*)(base + (8 * i + lane) * 16) = {word[i], word[i + 1], word[i + 2], word[i + 3]};
    if constexpr (PAIRS > QUADS) *(Words2*)(base + QUADS * 128 + lane * 8) = {word[QUADS], word[QUADS + 1]};
    if constexpr (WORDS > PAIRS) *(u32*)(base + PAIRS * 128 + lane * 4) = word[PAIRS];
  } else {
    UNROLL_FOR (int i = 0; i < WORDS; i++)
      *(u32*)(base + fragment_word(part * WORDS + i, lane, WORDS * PARTS) * 4) = word[i];
  }
}

// A plane of W bits of a warp's codes. Nibble n of a slice's word holds the plane's bits of value n. For W < 4, a word
// has 4 / W slices; the last slices, which do not fill a word, are in ``rest``. If a warp has fewer slices than a word,
// JOINED warps assemble the word in shared memory, and the first of them keeps it.
template <class F, int W> struct NibblePlane {
  static constexpr int SHARE = 4 / W;
  static constexpr int TAIL = (F::D / 16) % SHARE;
  static constexpr int JOINED = F::SPLIT > 1 && F::PER < SHARE ? SHARE / F::PER : 1;
  static constexpr int WORDS = JOINED > 1 ? 1 : F::LOCAL / SHARE, PARTS = F::SPLIT / JOINED;
  static_assert(F::SPLIT == 1 || (F::PER * JOINED % SHARE == 0 && F::SPLIT % JOINED == 0),
      "a word belongs to one warp");
  u32 word[WORDS > 0 ? WORDS : 1] = {}, rest[TAIL > 0 ? TAIL : 1] = {};

  DEVICE_MEMBER void put(int slice, u32 nibbles) {
    if (JOINED > 1 || slice / SHARE < WORDS)
      word[slice / SHARE] |= nibbles << (W * (slice % SHARE));  // slices come in any order
    else rest[slice % SHARE] = nibbles;
  }

  DEVICE_MEMBER void erase_token(int j) {
    const u32 mask = F::VALUES ? 0xFFu << (8 * j) : 0xFFFFu << (16 * j);  // its bits in a lane's word
    UNROLL_FOR (int i = 0; i < WORDS; i++) word[i] &= ~mask;
    UNROLL_FOR (int i = 0; i < TAIL; i++) rest[i] &= ~mask;
  }

  // Call `leave` before and `join` after a barrier of the warps. shared: [SPLIT][32].
  DEVICE_MEMBER void leave(u32* shared, int lane, int part) const {
    if constexpr (JOINED > 1) shared[32 * part + lane] = word[0] << (W * F::PER * (part % JOINED));
  }
  DEVICE_MEMBER void join(const u32* shared, int lane, int part) {
    if constexpr (JOINED > 1)
      if (part % JOINED == 0)
        UNROLL_FOR (int i = 1; i < JOINED; i++) word[0] |= shared[32 * (part + i) + lane];
  }

  // base: the plane in the tile; every token of the tile is written.
  DEVICE_MEMBER void store_tile(u8* base, int lane, int part) const {
    if constexpr (WORDS > 0)
      if (JOINED == 1 || part % JOINED == 0) store_plane_words<PARTS>(base, word, lane, part / JOINED);
  }

  // base: the plane in the tile of the lane's j-th token, whose index in that tile is ``position``.
  DEVICE_MEMBER void store_token(u8* base, int position, int j, int lane, int part) const {
    if (JOINED > 1 && part % JOINED) return;
    int row = position & 7, high = position >> 3;
    int there = F::VALUES ? (lane & ~3) + row / 2 : 4 * row + (lane & 3);
    int byte = F::VALUES ? 2 * high + (row & 1) : 2 * high;
    UNROLL_FOR (int i = 0; i < WORDS; i++) {
      int index = fragment_word((F::SPLIT == 1 ? 0 : part / JOINED * WORDS) + i, there, WORDS * PARTS);
      store_bytes(base + index * 4 + byte, word[i] >> (F::VALUES ? 8 * j : 16 * j), F::VALUES ? 1 : 2);
    }
  }

  // Stores the slices of ``rest``: the token's bits, dimension after dimension. Called by all lanes.
  DEVICE_MEMBER void store_row(u8* base, int position, int j, int lane, bool keep) const {
    UNROLL_FOR (int i = 0; i < TAIL; i++) {
      u32 row = 0;
      UNROLL_FOR (int n = 0; n < 8; n++)
        if (token_number<F>(n) == j) row |= (rest[i] >> (4 * n) & ((1u << W) - 1)) << (W * dim_of<F>(lane, n));
      if constexpr (F::VALUES) row |= shfl_xor(row, 4), row |= shfl_xor(row, 8), row |= shfl_xor(row, 16);
      else row |= shfl_xor(row, 1), row |= shfl_xor(row, 2);
      bool writer = F::VALUES ? lane < 4 : (lane & 3) == 0;
      if (writer && keep) store_bytes(base + 128 * WORDS + (position * TAIL + i) * 2 * W, row, 2 * W);
    }
  }
};

template <class F> struct BytePlane {  // a byte per value: two words per slice
  static constexpr int WORDS = 2 * F::LOCAL;
  u32 word[WORDS];

  DEVICE_MEMBER void erase_token(int j) {
    UNROLL_FOR (int i = 0; i < WORDS; i++) {
      if (!F::VALUES && (i & 1) == j) word[i] = 0;
      if (F::VALUES && (i & 1) == j >> 1) word[i] &= ~(0xFFFFu << (16 * (j & 1)));
    }
  }
  DEVICE_MEMBER void store_tile(u8* base, int lane, int part) const {
    store_plane_words<F::SPLIT>(base, word, lane, part);
  }
  DEVICE_MEMBER void store_token(u8* base, int position, int j, int lane, int part) const {
    int row = position & 7, high = position >> 3;
    int there = F::VALUES ? (lane & ~3) + row / 2 : 4 * row + (lane & 3);
    UNROLL_FOR (int i = 0; i < WORDS; i += 2) {
      int index = fragment_word(part * WORDS + i + high, there, WORDS * F::SPLIT);
      if constexpr (F::VALUES) store_bytes(base + index * 4 + 2 * (row & 1), word[i + (j >> 1)] >> (16 * (j & 1)), 2);
      else store_bytes(base + index * 4, word[i + j], 4);
    }
  }
  DEVICE_MEMBER void store_row(u8*, int, int, int, bool) const {}
};

struct NoPlane {};

// The offsets of the planes in a tile.
template <class F> constexpr int TWO_AT = 8 * F::D * F::FOUR;
template <class F> constexpr int ONE_AT = TWO_AT<F> + 4 * F::D * F::TWO;

// All codes of a warp's slices.
template <class F> struct CodePlanes {
  typename Choose<F::FOUR != 0, NibblePlane<F, 4>, NoPlane>::Type four;
  typename Choose<F::TWO != 0, NibblePlane<F, 2>, NoPlane>::Type two;
  typename Choose<F::ONE != 0, NibblePlane<F, 1>, NoPlane>::Type one;
  typename Choose<F::BITS == 8, BytePlane<F>, NoPlane>::Type byte;

  // low, high: the low and the high four bits of the slice's eight codes, as nibbles.
  DEVICE_MEMBER void put(int slice, u32 low, u32 high) {
    if constexpr (F::FOUR) four.put(slice, low);
    u32 more = F::FOUR ? high : low;
    if constexpr (F::TWO) two.put(slice, F::ONE ? more & 0x33333333u : more);
    if constexpr (F::ONE) one.put(slice, F::TWO ? more >> 2 & 0x11111111u : more);
  }
  DEVICE_MEMBER void put_bytes(int slice, u32 first, u32 second) {
    if constexpr (F::BITS == 8) byte.word[2 * slice] = first, byte.word[2 * slice + 1] = second;
  }
  // Words shared by several warps; see NibblePlane.
  DEVICE_MEMBER void leave(u32* shared, int lane, int part) const {
    if constexpr (F::TWO) two.leave(shared, lane, part);
    if constexpr (F::ONE) one.leave(shared + 32 * F::SPLIT * F::TWO, lane, part);
  }
  DEVICE_MEMBER void join(const u32* shared, int lane, int part) {
    if constexpr (F::TWO) two.join(shared, lane, part);
    if constexpr (F::ONE) one.join(shared + 32 * F::SPLIT * F::TWO, lane, part);
  }
  // Calls work(plane, its offset in a tile) for every plane.
  template <class Work> DEVICE_MEMBER void each(Work work) {
    if constexpr (F::FOUR) work(four, 0);
    if constexpr (F::TWO) work(two, TWO_AT<F>);
    if constexpr (F::ONE) work(one, ONE_AT<F>);
    if constexpr (F::BITS == 8) work(byte, 0);
  }
};

// Stores the bytes of single tokens; for a whole tile, only the bytes outside its words.
template <class F, int PAGE_TOKENS> DEVICE void store_tokens(CodePlanes<F>& codes, u8* pages, i64 page_stride, Slots s,
    int lane, int part) {
  UNROLL_FOR (int j = 0; j < F::TOKENS; j++) {
    i64 slot = shfl(s.slot, token_of<F>(lane, j));
    int position = slot < 0 ? 0 : (int)((u32)slot % PAGE_TOKENS);
    u8* tile = page_of<PAGE_TOKENS>(pages, page_stride, slot) + F::CODES + position / 16 * F::TILE_BYTES;
    if (slot >= 0 && !s.aligned)
      codes.each([&](auto& plane, int at) { plane.store_token(tile + at, position % 16, j, lane, part); });
    codes.each([&](auto& plane, int at) { plane.store_row(tile + at, position % 16, j, lane, slot >= 0); });
  }
}

// Stores codes and, by lanes 0 .. 15, the tokens' fields. A whole tile lies in one page.
template <class F, int PAGE_TOKENS> DEVICE void store_planes(CodePlanes<F>& codes, u32 field, u8* pages,
    i64 page_stride, Slots s, int lane, int part) {
  if (s.aligned) {
    u8* page = page_of<PAGE_TOKENS>(pages, page_stride, s.start);
    u32 position = (u32)s.start % PAGE_TOKENS;
    if (part == 0 && lane < 16) *(u16*)(page + F::FIELDS + 2 * (position + lane)) = (u16)field;
    u8* tile = page + F::CODES + position / 16 * F::TILE_BYTES;
    codes.each([&](auto& plane, int at) { plane.store_tile(tile + at, lane, part); });
    constexpr bool ROWS = (F::TWO && F::D / 16 % 2) || (F::ONE && F::D / 16 % 4);  // slices that do not fill a word
    if constexpr (!ROWS) return;
  } else if (part == 0 && lane < 16 && s.slot >= 0) {
    *(u16*)(page_of<PAGE_TOKENS>(pages, page_stride, s.slot) + F::FIELDS + 2 * ((u32)s.slot % PAGE_TOKENS)) =
        (u16)field;
  }
  store_tokens<F, PAGE_TOKENS>(codes, pages, page_stride, s, lane, part);
}
