// The bytes of its page that one token owns to its codes in shared memory: what write.cuh does, backwards.
#pragma once
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

// Codes of 8 bits, or numbers of 16 or 32 bits as they are, one after the other.
template <class F> struct WideUnits : WideLayout<F> {
  typedef WideLayout<F> Layout;
  u32 words[Layout::COUNT][Layout::WORDS];

  DEVICE_MEMBER void load(const u8* base, int position, int lane) {
    const Place place(position);
    UNROLL_FOR (int i = 0; i < Layout::COUNT; i++)
      UNROLL_FOR (int w = 0; w < Layout::WORDS; w++) {
        const u8* at = base + Layout::offset(place, 32 * i + lane, w);
        if (Layout::has(32 * i + lane)) words[i][w] = Layout::BYTES < 4 ? *(const u16*)at : *(const u32*)at;
      }
  }
  DEVICE_MEMBER void put(u8* to, int lane) const {
    UNROLL_FOR (int i = 0; i < Layout::COUNT; i++)
      UNROLL_FOR (int n = 0; n < Layout::NUMBERS; n++) {
        const int dim = Layout::dim(32 * i + lane, n);
        const u32 number = words[i][n / Layout::PER_WORD] >> (n % Layout::PER_WORD * F::BITS);
        if (!Layout::has(32 * i + lane)) continue;
        if constexpr (F::BITS == 32) ((u32*)to)[dim] = number;
        else if constexpr (F::BITS == 16) ((u16*)to)[dim] = (u16)number;
        else to[code_index(dim)] = (u8)number;
      }
    sync_warp();
  }
};

// A lane's part of a token: loaded ahead, then written to shared memory.
template <class F> struct Units {
  typename Choose<F::FOUR != 0, NibbleUnits<F, 4, 0, true>, NoPlane>::Type four;
  typename Choose<F::TWO != 0, NibbleUnits<F, 2, 4 * F::FOUR, !F::FOUR>, NoPlane>::Type two;
  typename Choose<F::ONE != 0, NibbleUnits<F, 1, 4 * F::FOUR + 2 * F::TWO, !F::FOUR && !F::TWO>, NoPlane>::Type one;
  typename Choose<F::BITS >= 8, WideUnits<F>, NoPlane>::Type wide;
  u32 field;

  template <int PAGE_TOKENS> DEVICE_MEMBER void load(const u8* pages, i64 page_stride, i64 slot, int lane) {
    const u8* page = pages + (i64)((u64)slot / PAGE_TOKENS) * page_stride;
    int position = (int)((u32)slot % PAGE_TOKENS);
    const u8* tile = page + F::CODES + position / 16 * F::TILE_BYTES;
    if constexpr (F::FOUR) four.load(tile, position, lane);
    if constexpr (F::TWO) two.load(tile + TWO_AT<F>, position, lane);
    if constexpr (F::ONE) one.load(tile + ONE_AT<F>, position, lane);
    if constexpr (F::BITS >= 8) wide.load(tile, position, lane);
    if constexpr (F::KIND != RAW) field = *(const u16*)(page + F::FIELDS + 2 * position);
  }
  DEVICE_MEMBER void put(u8* codes, int lane) const {
    if constexpr (F::FOUR) four.put(codes, lane);
    if constexpr (F::TWO) two.put(codes, lane);
    if constexpr (F::ONE) one.put(codes, lane);
    if constexpr (F::BITS >= 8) wide.put(codes, lane);
  }
  DEVICE_MEMBER float scale() const { return field == INVALID_FIELD ? NOT_A_NUMBER : decode_unsigned(field); }
};
