// From the codes of one token in shared memory to the bytes of the page that it owns (see docs/design/page-format.md).
#pragma once
#include "store/pages.cuh"
#include "vectors/layout.cuh"

// Bits SHIFT .. SHIFT + W - 1 of two codes, as nibbles of a byte.
template <int W, int SHIFT> DEVICE u32 nibble_pair(u32 first, u32 second) {
  constexpr u32 MASK = (1 << W) - 1;
  return (first >> SHIFT & MASK) | (second >> SHIFT & MASK) << 4;
}

// Stores `bytes` of a plain row: bits SHIFT .. SHIFT + W - 1 of the codes from dimension `first` on.
template <int W, int SHIFT> DEVICE void store_plain(const u8* codes, int first, int bytes, u32 keep, u8* to, int lane) {
  for (int at = lane; at < bytes; at += 32) {
    u32 bits = 0;
    UNROLL_FOR (int n = 0; n < 8 / W; n++)
      bits |= ((u32)codes[code_index(first + at * (8 / W) + n)] >> SHIFT & ((1 << W) - 1)) << (W * n);
    to[at] = (u8)(bits & keep);
  }
}

// Stores a plane of W <= 4 bits: bits SHIFT .. SHIFT + W - 1 of the codes.
template <class F, int W, int SHIFT> DEVICE void store_nibbles(const u8* codes, u32 keep, u8* base, int position,
    int lane) {
  constexpr int SHARE = 4 / W, SLICES = F::D / 16, WORDS = SLICES / SHARE, TAIL = SLICES % SHARE,
                PARTS = F::VALUES ? 8 : 4;
  const Place place(position);
  UNROLL_FOR (int i = 0; i < (WORDS * PARTS + 31) / 32; i++) {
    int unit = 32 * i + lane, part = unit % PARTS, word = unit / PARTS;
    if (WORDS * PARTS % 32 && word >= WORDS) break;
    u32 bits = 0;
    UNROLL_FOR (int j = 0; j < SHARE; j++) {
      int dim = 16 * (word * SHARE + j);
      if constexpr (F::VALUES) {
        bits |= nibble_pair<W, SHIFT>(codes[code_index(dim + part)], codes[code_index(dim + part + 8)]) << (W * j);
      } else {
        u32 low = *(const u16*)(codes + code_index(dim + 2 * part)),
            high = *(const u16*)(codes + code_index(dim + 2 * part + 8));
        bits |= (nibble_pair<W, SHIFT>(low & 0xFF, low >> 8) | nibble_pair<W, SHIFT>(high & 0xFF, high >> 8) << 8)
            << (W * j);
      }
    }
    u8* at = base + fragment_word(word, place.template lane_of<F::VALUES>(part), WORDS) * 4 + 2 * place.high;
    if constexpr (F::VALUES) at[place.row & 1] = (u8)(bits & keep);
    else *(u16*)at = (u16)(bits & keep);
  }
  constexpr int BYTES = TAIL * 2 * W;  // for slices that do not fill a word
  if constexpr (TAIL > 0)
    store_plain<W, SHIFT>(codes, 16 * WORDS * SHARE, BYTES, keep, base + 128 * WORDS + (position & 15) * BYTES, lane);
}

// Stores codes of 8 bits, or numbers of 16 or 32 bits: number(dim) for each dimension.
template <class F, class Number> DEVICE void store_wide(const Number& number, u32 keep, u8* tile, int position,
    int lane) {
  typedef WideLayout<F> Layout;
  const Place place(position);
  UNROLL_FOR (int i = 0; i < Layout::COUNT; i++) {
    if (!Layout::has(32 * i + lane)) break;
    UNROLL_FOR (int w = 0; w < Layout::WORDS; w++) {
      u32 word = 0;
      UNROLL_FOR (int n = 0; n < Layout::PER_WORD; n++)
        word |= number(Layout::dim(32 * i + lane, w * Layout::PER_WORD + n)) << (F::BITS * n);
      store_bytes(tile + Layout::offset(place, 32 * i + lane, w), word & keep, Layout::BYTES < 4 ? 2 : 4);
    }
  }
}

struct Encoded {
  u32 field;
  u32 keep;  // all ones, or 0 to clear all codes
};

template <class F, int PAGE_TOKENS> DEVICE void store_vector(const u8* codes, Encoded field, u8* pages, i64 page_stride,
    i64 slot, int lane) {
  u8* page = page_of<PAGE_TOKENS>(pages, page_stride, slot);
  int position = (int)((u32)slot % PAGE_TOKENS);
  u8* tile = page + F::CODES + position / 16 * F::TILE_BYTES;
  if (lane == 0) *(u16*)(page + F::FIELDS + 2 * position) = (u16)field.field;
  if constexpr (ROW_STRIDE > 0) {
    u8* row = page + F::CODES + position * ROW_STRIDE;
    if constexpr (F::BITS == 8) store_plain<8, 0>(codes, 0, F::D, field.keep, row, lane);
    if constexpr (F::FOUR) store_plain<4, 0>(codes, 0, F::D / 2, field.keep, row, lane);
    if constexpr (F::TWO) store_plain<2, 4 * F::FOUR>(codes, 0, F::D / 4, field.keep, row + TWO_AT<F> / 16, lane);
    if constexpr (F::ONE)
      store_plain<1, 4 * F::FOUR + 2 * F::TWO>(codes, 0, F::D / 8, field.keep, row + ONE_AT<F> / 16, lane);
    return;
  }
  if constexpr (F::BITS == 8)
    store_wide<F>([&](int dim) -> u32 { return codes[code_index(dim)]; }, field.keep, tile, position, lane);
  if constexpr (F::FOUR) store_nibbles<F, 4, 0>(codes, field.keep, tile, position, lane);
  if constexpr (F::TWO) store_nibbles<F, 2, 4 * F::FOUR>(codes, field.keep, tile + TWO_AT<F>, position, lane);
  if constexpr (F::ONE)
    store_nibbles<F, 1, 4 * F::FOUR + 2 * F::TWO>(codes, field.keep, tile + ONE_AT<F>, position, lane);
}

// Stores unquantised numbers of 16 or 32 bits.
template <class F, int PAGE_TOKENS> DEVICE void store_raw(const u8* row, u8* pages, i64 page_stride, i64 slot,
    int lane) {
  typedef typename Choose<F::BITS == 32, u32, u16>::Type Number;
  const Number* numbers = (const Number*)row;
  int position = (int)((u32)slot % PAGE_TOKENS);
  u8* side = page_of<PAGE_TOKENS>(pages, page_stride, slot) + F::CODES;
  if constexpr (ROW_STRIDE > 0)
    for (int d = lane; d < F::D; d += 32) ((Number*)(side + position * ROW_STRIDE))[d] = numbers[d];
  else
    store_wide<F>([&](int dim) -> u32 { return numbers[dim]; }, 0xFFFFFFFFu, side + position / 16 * F::TILE_BYTES,
        position, lane);
}
