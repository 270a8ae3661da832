// Loads the rows of a tile: lane 4 g + t loads groups of eight dimensions (eights) of tokens g and g + 8.
#pragma once
#include "store/format.cuh"

template <class F> DEVICE void load_eight(const u8* p, u32 raw[F::RAW]) {
  if constexpr (F::VECTORS) {
    UNROLL_FOR (int i = 0; i < F::RAW / 4; i++) {
      Words4 w = ldg_streaming(p + 16 * i);
      raw[4 * i] = w.x, raw[4 * i + 1] = w.y, raw[4 * i + 2] = w.z, raw[4 * i + 3] = w.w;
    }
  } else {
    UNROLL_FOR (int i = 0; i < F::RAW; i++)
      raw[i] = F::NARROW ? ((const u16*)p)[2 * i] | (u32)((const u16*)p)[2 * i + 1] << 16 : ((const u32*)p)[i];
  }
}

template <int DTYPE> DEVICE float element(const u32* raw, int i) {
  if constexpr (DTYPE == FLOAT32) return as_float(raw[i]);
  else if constexpr (DTYPE == BFLOAT16) return as_float(i & 1 ? raw[i / 2] & 0xFFFF0000u : raw[i / 2] << 16);
  else return f16_to_f32(i & 1 ? raw[i / 2] >> 16 : raw[i / 2] & 0xFFFFu);
}

// Eight dimensions of a head's key offset.
struct OffsetEight {
  u32 bits[4];
  template <class F> DEVICE_MEMBER void load(const SideArgs& side, int head, int dim) {
    const Words4 w = ldg_cached((const u8*)(side.offset + head * F::D + dim));
    bits[0] = w.x, bits[1] = w.y, bits[2] = w.z, bits[3] = w.w;
  }
  // x - offset, rounded to the input's dtype. For bfloat16, one rounding equals rounding through float32.
  template <class F> DEVICE_MEMBER void subtract_from(u32 raw[F::RAW]) const {
    if constexpr (F::DTYPE == BFLOAT16) {
      UNROLL_FOR (int i = 0; i < 4; i++) raw[i] = sub_bf16x2(raw[i], bits[i]);
      return;
    }
    float x[8];
    UNROLL_FOR (int i = 0; i < 8; i++) x[i] = sub_rn(element<F::DTYPE>(raw, i), element<BFLOAT16>(bits, i));
    UNROLL_FOR (int i = 0; i < F::RAW; i++)
      raw[i] = F::DTYPE == FLOAT32 ? as_bits(x[i]) : pack_f16x2(x[2 * i % 8], x[(2 * i + 1) % 8]);
  }
};

// Subtracts the key offset from rows in the order of load_rows.
template <class F> DEVICE void subtract_offset(const SideArgs& side, int head, int lane,
    u32 raw[F::CHUNKS][2][F::RAW]) {
  if (!side.offset) return;
  UNROLL_FOR (int c = 0; c < F::CHUNKS; c++) {
    const int within = c % F::STEPS * 32 + 8 * (lane & 3);
    if (F::INNER % 32 != 0 && within >= F::INNER) continue;
    OffsetEight offset;
    offset.load<F>(side, head, c / F::STEPS * F::INNER + within);
    offset.subtract_from<F>(raw[c][0]);
    offset.subtract_from<F>(raw[c][1]);
  }
}

// Loads tokens g and g + 8: of each chunk c of 32 dimensions, dimensions 8 t .. 8 t + 7.
template <class F> DEVICE void load_rows(const SideArgs& side, int head, int first, int tokens, int lane,
    u32 raw[F::CHUNKS][2][F::RAW]) {
  const u8* x = side.x + head * side.head_stride;
  UNROLL_FOR (int half = 0; half < 2; half++) {
    int token = first + (lane >> 2) + 8 * half;
    const u8* row = x + token * side.stride;
    UNROLL_FOR (int c = 0; c < F::CHUNKS; c++) {
      int within = c % F::STEPS * 32 + 8 * (lane & 3);
      if (token < tokens && (F::INNER % 32 == 0 || within < F::INNER))
        load_eight<F>(row + (c / F::STEPS * F::INNER + within) * F::ELEMENT, raw[c][half]);
      else
        UNROLL_FOR (int i = 0; i < F::RAW; i++) raw[c][half][i] = 0;
    }
  }
  if constexpr (!F::VALUES) subtract_offset<F>(side, head, lane, raw);
}

// load_rows with prefetching through shared memory. A lane copies only what it reads, so lanes need not synchronise.
template <class F> struct RowBuffer {
  static constexpr int PIECES = F::RAW / 4, BYTES = F::VECTORS ? F::CHUNKS * 2 * PIECES * 512 : 0;
  u8* memory;
  const u8* next;  // the lane's first eight of token g of the next tile
  i64 ahead;       // bytes between tiles

  // Tiles of 16 tokens from ``first`` on, every ``tokens_apart``.
  DEVICE_MEMBER RowBuffer(u8* memory, const SideArgs& side, int head, int first, int tokens_apart, int lane)
      : memory(memory),
        next(side.x + head * side.head_stride + (first + (lane >> 2)) * side.stride + 8 * (lane & 3) * F::ELEMENT),
        ahead(tokens_apart * side.stride) {}

  // ``first``: the first token of the next tile.
  DEVICE_MEMBER void fetch(const SideArgs& side, int first, int tokens, int lane) {
    if constexpr (F::VECTORS) {
      UNROLL_FOR (int i = 0; i < 2 * F::CHUNKS; i++) {
        int c = i / 2, token = first + (lane >> 2) + 8 * (i & 1);
        const u8* from = next + (i & 1) * 8 * side.stride + (c / F::STEPS * F::INNER + c % F::STEPS * 32) * F::ELEMENT;
        bool real = token < tokens && (F::INNER % 32 == 0 || c % F::STEPS * 32 + 8 * (lane & 3) < F::INNER);
        UNROLL_FOR (int j = 0; j < PIECES; j++)
          cp_async_16_or_zero(real, memory + (i * PIECES + j) * 512 + 16 * lane, from + 16 * j);
      }
      next += ahead;
    }
    cp_async_commit();
  }
  DEVICE_MEMBER void take(const SideArgs& side, int head, int first, int tokens, int lane,
      u32 raw[F::CHUNKS][2][F::RAW]) const {
    cp_async_wait<0>();
    if constexpr (!F::VECTORS) return load_rows<F>(side, head, first, tokens, lane, raw);
    UNROLL_FOR (int i = 0; i < 2 * F::CHUNKS; i++)
      UNROLL_FOR (int j = 0; j < PIECES; j++) {
        Words4 w = *(const Words4*)(memory + (i * PIECES + j) * 512 + 16 * lane);
        u32* to = raw[i / 2][i & 1] + 4 * j;
        to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
      }
    if constexpr (!F::VALUES) subtract_offset<F>(side, head, lane, raw);
  }
};
