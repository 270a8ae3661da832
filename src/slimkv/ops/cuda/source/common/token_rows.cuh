// The last TAIL slices of a plane, which do not fill a word. Pages store them as one row per token, slice after slice
// (docs/design/page-format.md). They are loaded as one more word per lane: the bits of nibble n from W j on hold value
// n of slice j, as in whole words, and the other bits are undefined.
#pragma once
#include "common/types.cuh"

template <class T> DEVICE T row_part(const u8* rows, int at) { return *(const T*)(rows + at); }

// Keys: tokens g and g + 8, dimensions 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
template <int W, int TAIL> DEVICE u32 key_rows_word(const u8* rows, int lane) {
  const int g = lane >> 2, t = lane & 3;
  if constexpr (W == 2) {
    static_assert(TAIL == 1, "two slices are a whole word");
    const u32 both =
        prmt(row_part<u32>(rows, 4 * g), row_part<u32>(rows, 32 + 4 * g), 0x6420 + 0x1111 * (t >> 1)) >> (4 * (t & 1));
    return bit_select(0x0F0F0F0Fu, both, both << 2);
  } else {
    u32 even = 0, odd = 0;  // bit j of a byte: dimensions 2 t of both halves of slice j; bit j + 1: dimensions 2 t + 1
    UNROLL_FOR (int j = 0; j < TAIL; j++) {
      u32 both;
      if constexpr (TAIL == 2)
        both = prmt(row_part<u32>(rows, 4 * g), row_part<u32>(rows, 32 + 4 * g), j ? 0x7632 : 0x5410);
      else both = prmt(row_part<u16>(rows, 2 * (TAIL * g + j)), row_part<u16>(rows, 2 * (TAIL * (g + 8) + j)), 0x5410);
      both = both >> (2 * t) << j;
      even = j ? bit_select(0x01010101u << j, both, even) : both;
      odd = j ? bit_select(0x02020202u << j, both, odd) : both;
    }
    return bit_select(0x0F0F0F0Fu, even, odd << 3);
  }
}

// Values: tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, dimensions g and g + 8.
template <int W, int TAIL> DEVICE u32 value_rows_word(const u8* rows, int lane) {
  const int g = lane >> 2, t = lane & 3;
  if constexpr (W == 2) {
    static_assert(TAIL == 1, "two slices are a whole word");
    const Words2 first = row_part<Words2>(rows, 8 * t), second = row_part<Words2>(rows, 32 + 8 * t);
    const u32 selector = 0x6240 + 0x1111 * (g >> 2);
    const u32 a = prmt(first.x, first.y, selector), b = prmt(second.x, second.y, selector), down = 2 * (g & 3);
    return bit_select(0x0F0F0F0Fu, prmt(a, b, 0x5410) >> down, prmt(a, b, 0x7632) >> down << 4);
  } else if constexpr (TAIL == 1) {
    const u32 first = row_part<u32>(rows, 4 * t) >> g, second = row_part<u32>(rows, 16 + 4 * t) >> g;
    return bit_select(0x0F0F0F0Fu, prmt(first, second, 0x6420), prmt(first, second, 0x7531) << 4);
  } else {
    // Bit g of each byte of a row is dimension g or g + 8 of a slice. A multiplication gathers four such bits, because
    // logic units are busier: bits j and 4 + j of a token's byte are dimensions g and g + 8 of slice j, shifted by g.
    const u32 own = 0x01010101u << g;
    u32 two_tokens[2];
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const u8* two_rows = rows + 2 * TAIL * (2 * t + 8 * i);
      u32 first, second;
      if constexpr (TAIL == 2) {
        const Words2 both = row_part<Words2>(two_rows, 0);
        first = dp4a_u8(both.x & own, 0x20021001u, 0), second = dp4a_u8(both.y & own, 0x20021001u, 0);
      } else {
        const u32 a = row_part<u32>(two_rows, 0) & own, b = row_part<u32>(two_rows, 4) & own,
                  c = row_part<u32>(two_rows, 8) & own;
        first = dp4a_u8(b, 0x00004004u, dp4a_u8(a, 0x20021001u, 0)),
        second = dp4a_u8(c, 0x40042002u, dp4a_u8(b, 0x10010000u, 0));
      }
      two_tokens[i] = first + 256 * second;
    }
    return (two_tokens[0] >> g) + two_tokens[1] * (65536u >> g);
  }
}
