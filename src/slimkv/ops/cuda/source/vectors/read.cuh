// The bytes of its page that one token owns to its codes in shared memory: what write.cuh does, backwards.
#pragma once
#include "store/fields.cuh"
#include "store/pages.cuh"
#include "vectors/layout.cuh"

// A plane of W <= 4 bits: those of the codes from SHIFT on. The first plane sets codes, others add to them.
template <class F, int W, int SHIFT, bool FIRST> struct NibbleUnits {
  static constexpr int SHARE = 4 / W, SLICES = F::D / 16, WORDS = SLICES / SHARE, TAIL = SLICES % SHARE,
                       PARTS = F::VALUES ? 8 : 4;
  static constexpr int COUNT = (WORDS * PARTS + 31) / 32, TAIL_BYTES = TAIL * 2 * W;
  static constexpr u32 MASK = (1 << W) - 1;
  u32 bits[COUNT > 0 ? COUNT : 1], rest;

  DEVICE_MEMBER static bool has(int i, int lane) { return WORDS * PARTS % 32 == 0 || 32 * i + lane < WORDS * PARTS; }

  // base: the plane in the tile.
  DEVICE_MEMBER void load(const u8* base, int position, int lane) {
    const Place place(position);
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, word = unit / PARTS;
      if (!has(i, lane)) continue;
      const u8* at = base + fragment_word(word, place.template lane_of<F::VALUES>(part), WORDS) * 4 + 2 * place.high;
      bits[i] = F::VALUES ? at[place.row & 1] : *(const u16*)at;
    }
    if (TAIL_BYTES > 0 && lane < TAIL_BYTES) rest = base[128 * WORDS + (position & 15) * TAIL_BYTES + lane];
  }

  template <class T> DEVICE_MEMBER static void set(u8* at, u32 code) {
    if constexpr (FIRST) *(T*)at = (T)(code << SHIFT);
    else *(T*)at = (T)(*(T*)at | code << SHIFT);
  }
  DEVICE_MEMBER void put(u8* codes, int lane) const {
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, word = unit / PARTS;
      if (!has(i, lane)) continue;
      UNROLL_FOR (int j = 0; j < SHARE; j++) {
        int dim = 16 * (word * SHARE + j);
        u32 four = bits[i] >> (W * j);
        if constexpr (F::VALUES) {
          set<u8>(codes + code_index(dim + part), four & MASK);
          set<u8>(codes + code_index(dim + part + 8), four >> 4 & MASK);
        } else {
          set<u16>(codes + code_index(dim + 2 * part), (four & MASK) | (four >> 4 & MASK) << 8);
          set<u16>(codes + code_index(dim + 2 * part + 8), (four >> 8 & MASK) | (four >> 12 & MASK) << 8);
        }
      }
    }
    if (TAIL_BYTES > 0 && lane < TAIL_BYTES)
      UNROLL_FOR (int n = 0; n < 8 / W; n++)
        set<u8>(codes + code_index(16 * WORDS * SHARE + lane * (8 / W) + n), rest >> (W * n) & MASK);
    sync_warp();
  }
};

template <class F> struct ByteUnits {
  static constexpr int SLICES = F::D / 16, PARTS = F::VALUES ? 8 : 4, COUNT = (SLICES * PARTS + 31) / 32;
  u32 bits[COUNT];

  DEVICE_MEMBER static bool has(int i, int lane) { return SLICES * PARTS % 32 == 0 || 32 * i + lane < SLICES * PARTS; }
  DEVICE_MEMBER void load(const u8* base, int position, int lane) {
    const Place place(position);
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, slice = unit / PARTS;
      if (!has(i, lane)) continue;
      const u8* at =
          base + fragment_word(2 * slice + place.high, place.template lane_of<F::VALUES>(part), 2 * SLICES) * 4;
      bits[i] = F::VALUES ? *(const u16*)(at + 2 * (place.row & 1)) : *(const u32*)at;
    }
  }
  DEVICE_MEMBER void put(u8* codes, int lane) const {
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, dim = unit / PARTS * 16;
      if (!has(i, lane)) continue;
      if constexpr (F::VALUES) {
        codes[code_index(dim + part)] = (u8)bits[i], codes[code_index(dim + part + 8)] = (u8)(bits[i] >> 8);
      } else {
        *(u16*)(codes + code_index(dim + 2 * part)) = (u16)bits[i];
        *(u16*)(codes + code_index(dim + 2 * part + 8)) = (u16)(bits[i] >> 16);
      }
    }
    sync_warp();
  }
};

// Numbers of 16 or 32 bits, as they are, one after the other.
template <class F> struct RawUnits {
  static constexpr int SLICES = F::D / 16, PARTS = F::VALUES ? 8 : 4, COUNT = (SLICES * PARTS + 31) / 32;
  static constexpr int NUMBERS = F::VALUES ? 2 : 4, EACH = NUMBERS * F::BITS / 32, PER_SLICE = F::BITS / 4;  // words
  u32 words[COUNT][EACH];

  DEVICE_MEMBER static bool has(int i, int lane) { return SLICES * PARTS % 32 == 0 || 32 * i + lane < SLICES * PARTS; }
  DEVICE_MEMBER void load(const u8* base, int position, int lane) {
    const Place place(position);
    int first = (4 * place.high + (F::VALUES ? 2 * (place.row & 1) : 0)) * F::BITS / 32;
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, slice = unit / PARTS;
      if (!has(i, lane)) continue;
      UNROLL_FOR (int n = 0; n < EACH; n++)
        words[i][n] = *(const u32*)(base +
            fragment_word(slice * PER_SLICE + first + n, place.template lane_of<F::VALUES>(part), SLICES * PER_SLICE) *
                4);
    }
  }
  DEVICE_MEMBER void put(u8* numbers, int lane) const {
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
      int unit = 32 * i + lane, part = unit % PARTS, slice = unit / PARTS;
      if (!has(i, lane)) continue;
      UNROLL_FOR (int n = 0; n < NUMBERS; n++) {
        int dim = 16 * slice + (F::VALUES ? part + 8 * n : 2 * part + (n & 1) + 8 * (n >> 1));
        if constexpr (F::BITS == 32) ((u32*)numbers)[dim] = words[i][n];
        else ((u16*)numbers)[dim] = (u16)(words[i][n / 2] >> (16 * (n & 1)));
      }
    }
    sync_warp();
  }
};

// What a lane has of a token: loaded ahead, and then put to shared memory.
template <class F> struct Units {
  typename Choose<F::FOUR != 0, NibbleUnits<F, 4, 0, true>, NoPlane>::Type four;
  typename Choose<F::TWO != 0, NibbleUnits<F, 2, 4 * F::FOUR, !F::FOUR>, NoPlane>::Type two;
  typename Choose<F::ONE != 0, NibbleUnits<F, 1, 4 * F::FOUR + 2 * F::TWO, !F::FOUR && !F::TWO>, NoPlane>::Type one;
  typename Choose<F::BITS == 8, ByteUnits<F>, NoPlane>::Type byte;
  typename Choose<F::KIND == RAW, RawUnits<F>, NoPlane>::Type raw;
  u32 field;

  template <int PAGE_TOKENS> DEVICE_MEMBER void load(const u8* pages, i64 page_stride, i64 slot, int lane) {
    const u8* page = pages + (i64)((u64)slot / PAGE_TOKENS) * page_stride;
    int position = (int)((u32)slot % PAGE_TOKENS);
    const u8* tile = page + F::CODES + position / 16 * F::TILE_BYTES;
    if constexpr (F::FOUR) four.load(tile, position, lane);
    if constexpr (F::TWO) two.load(tile + TWO_AT<F>, position, lane);
    if constexpr (F::ONE) one.load(tile + ONE_AT<F>, position, lane);
    if constexpr (F::BITS == 8) byte.load(tile, position, lane);
    if constexpr (F::KIND == RAW) raw.load(tile, position, lane);
    else field = *(const u16*)(page + F::FIELDS + 2 * position);
  }
  DEVICE_MEMBER void put(u8* codes, int lane) const {
    if constexpr (F::FOUR) four.put(codes, lane);
    if constexpr (F::TWO) two.put(codes, lane);
    if constexpr (F::ONE) one.put(codes, lane);
    if constexpr (F::BITS == 8) byte.put(codes, lane);
    if constexpr (F::KIND == RAW) raw.put(codes, lane);
  }
  DEVICE_MEMBER float scale() const { return field == INVALID_FIELD ? NOT_A_NUMBER : decode_unsigned(field); }
};
