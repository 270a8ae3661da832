// Unpacks pages into rows of numbers that attention multiplies.
//
// Codes of up to 4 bits become signed bytes through a table in a register: a tile of 16 tokens is converted to words of
// eight nibbles (the order of 4-bit pages; other widths are shifted and masked into it), and each word to bytes.
// Other codes are read value by value, at the positions of codec.pack, and become float32.
#pragma once

#include "simd.h"

constexpr int CHUNK = 128;  // tokens that are unpacked together

// A chunk of K has rows [token][position]. A chunk of V is [position / 16][token / 4][position % 16][4]: four tokens of
// a dimension are contiguous. `order[position]` is the dimension of a position; the order follows the pages.
static inline i64 value_offset(i64 position, i64 token) {
  return (position / 16 * (CHUNK / 4) + token / 4) * 64 + position % 16 * 4;
}

static inline int group_words(int slices, int first) {  // slices are held in vectors of four words, then two, then one
  const int left = slices - first;
  return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

static void key_order(int dim, i32* order) {
  for (int first = 0, v; first < dim / SLICE; first += v) {
    v = group_words(dim / SLICE, first);
    for (int t = 0; t < 4; t++)
      for (int w = 0; w < v; w++)
        for (int b = 0; b < 2; b++) {
          const int at = SLICE * first + (t * v + w) * 2 + b, d = SLICE * (first + w) + 2 * t + 8 * b;
          order[at] = d;
          order[at + 8 * v] = d + 1;
        }
  }
}

static void value_order(int dim, i32* order) {
  for (int first = 0, v; first < dim / SLICE; first += v) {
    v = group_words(dim / SLICE, first);
    for (int g = 0; g < 8; g++)
      for (int w = 0; w < v; w++) {
        order[SLICE * first + g * 2 * v + w] = SLICE * (first + w) + g;
        order[SLICE * first + g * 2 * v + v + w] = SLICE * (first + w) + g + 8;
      }
  }
}

// The token within its tile at index 4 t + k of V.
static inline int value_token(int at) { return 2 * (at >> 2) + (at & 1) + 8 * (at >> 1 & 1); }

// Whether the codes of a side become bytes.
static inline bool becomes_bytes(const Side& side) {
  if (side.block_size < TILE || side.bits > 4 || (side.kind != LLOYD && side.kind != UNIFORM)) return false;
  for (int p = 0; p < side.plane_count; p++)
    if (side.planes[p].tail_slices) return false;
  return true;
}

// Uniform codes are centred: sums of positive codes would cancel against the zeros and lose precision.
static inline int uniform_centre(const Side& side) { return side.kind == UNIFORM ? 1 << (side.bits - 1) : 0; }

// 16 signed bytes by code: twice the level (an odd number), or the centred code.
static void byte_table(const Side& side, u8* table) {
  for (int code = 0; code < 16; code++) {
    const int known = code & ((1 << side.bits) - 1);
    table[code] = (u8)(side.kind == LLOYD ? (int)(2 * side.levels[known]) : known - uniform_centre(side));
#if defined(SLIMKV_DOT_UNSIGNED)
    table[code] ^= 0x80;
#endif
  }
}

static inline float byte_unit(const Side& side) { return side.kind == LLOYD ? 0.5f : 1.0f; }

// Index of a word of a lane: vectors of four words per lane, then of two, then single words (spec.fragment_word).
static inline int fragment_word(int word, int lane, int words) {
  const int quads = words & ~3, pairs = words & ~1;
  if (word < quads) return (word >> 2) * (4 * LANES) + lane * 4 + (word & 3);
  if (word < pairs) return quads * LANES + lane * 2 + (word & 1);
  return pairs * LANES + lane;
}

// Adds a plane of 1 or 2 bits to the nibbles of a tile's words, which are in the order of a 4-bit plane.
static void add_plane(const u8* codes, const Plane& plane, int slices, u32* nibbles) {
  const int per_word = 4 / plane.bits;
  const u32 mask = plane.bits == 1 ? 0x11111111u : 0x33333333u;
  const u8* data = codes + plane.offset;
  for (int s = 0; s < slices; s++) {
    const int shift = plane.bits * (s % per_word);
    const int from = fragment_word(s / per_word, 0, plane.words), to = fragment_word(s, 0, slices);
    const int from_step = fragment_word(s / per_word, 1, plane.words) - from;
    const int to_step = fragment_word(s, 1, slices) - to;
    for (int lane = 0; lane < LANES; lane++)
      nibbles[to + lane * to_step] |= (load_u32(data + 4 * (from + lane * from_step)) >> shift & mask) << plane.low_bit;
  }
}

// The codes of a tile as words of nibbles; 4-bit planes are used in place.
static const u8* nibble_words(const Side& side, const u8* codes, u32* nibbles) {
  if (side.bits == 4) return codes;
  const int slices = side.dim / SLICE;
  memset(nibbles, 0, sizeof(u32) * LANES * slices);
  for (int p = 0; p < side.plane_count; p++) add_plane(codes, side.planes[p], slices, nibbles);
  return (const u8*)nibbles;
}

// One word of a lane at a time: for groups of fewer than four words, or without byte-shuffle instructions.
static void key_group_plain(const u8* data, int v, int g, const u8* table, u8* low_token, u8* high_token) {
  for (int i = 0; i < 4 * v; i++) {
    const u8* word = data + 4 * (g * 4 * v + i);
    for (int b = 0; b < 2; b++) {
      low_token[2 * i + b] = table[word[b] & 15];
      low_token[8 * v + 2 * i + b] = table[word[b] >> 4];
      high_token[2 * i + b] = table[word[2 + b] & 15];
      high_token[8 * v + 2 * i + b] = table[word[2 + b] >> 4];
    }
  }
}

static void value_group_plain(const u8* data, int v, int g, const u8* table, u8* out, int position, int token) {
  for (int t = 0; t < 4; t++)
    for (int w = 0; w < v; w++) {
      const u8* word = data + 4 * ((4 * g + t) * v + w);
      u8* low = out + value_offset(position + g * 2 * v + w, token + 4 * t);
      u8* high = out + value_offset(position + g * 2 * v + v + w, token + 4 * t);
      for (int k = 0; k < 4; k++) {
        low[k] = table[word[k] & 15];
        high[k] = table[word[k] >> 4];
      }
    }
}

// Four slices of tokens g and g + 8: 64 packed bytes -> 64 bytes for each token.
static inline void key_group(const u8* data, int g, const u8* table, u8* low_token, u8* high_token) {
#if defined(SLIMKV_NEON)
  const uint8x16_t levels = vld1q_u8(table), low_bits = vdupq_n_u8(15);
  const u16* p = (const u16*)(data + 64 * g);
  for (int i = 0; i < 2; i++) {
    const uint16x8_t a = vld1q_u16(p + 16 * i), b = vld1q_u16(p + 16 * i + 8);
    const uint8x16_t one = vreinterpretq_u8_u16(vuzp1q_u16(a, b)), other = vreinterpretq_u8_u16(vuzp2q_u16(a, b));
    vst1q_u8(low_token + 16 * i, vqtbl1q_u8(levels, vandq_u8(one, low_bits)));
    vst1q_u8(low_token + 32 + 16 * i, vqtbl1q_u8(levels, vshrq_n_u8(one, 4)));
    vst1q_u8(high_token + 16 * i, vqtbl1q_u8(levels, vandq_u8(other, low_bits)));
    vst1q_u8(high_token + 32 + 16 * i, vqtbl1q_u8(levels, vshrq_n_u8(other, 4)));
  }
#elif defined(SLIMKV_X86)
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  const __m256i low_bits = _mm256_set1_epi8(15);
  const __m256i apart =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  __m256i a = _mm256_loadu_si256((const __m256i*)(data + 64 * g)),
          b = _mm256_loadu_si256((const __m256i*)(data + 64 * g + 32));
  a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(a, apart), 0xD8);
  b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(b, apart), 0xD8);
  const __m256i one = _mm256_permute2x128_si256(a, b, 0x20), other = _mm256_permute2x128_si256(a, b, 0x31);
  const __m256i one_high = _mm256_and_si256(_mm256_srli_epi16(one, 4), low_bits);
  const __m256i other_high = _mm256_and_si256(_mm256_srli_epi16(other, 4), low_bits);
  _mm256_storeu_si256((__m256i*)low_token, _mm256_shuffle_epi8(levels, _mm256_and_si256(one, low_bits)));
  _mm256_storeu_si256((__m256i*)(low_token + 32), _mm256_shuffle_epi8(levels, one_high));
  _mm256_storeu_si256((__m256i*)high_token, _mm256_shuffle_epi8(levels, _mm256_and_si256(other, low_bits)));
  _mm256_storeu_si256((__m256i*)(high_token + 32), _mm256_shuffle_epi8(levels, other_high));
#else
  key_group_plain(data, 4, g, table, low_token, high_token);
#endif
}

// Four slices, dimensions g and g + 8 of each: 64 packed bytes -> 32 bytes for every four tokens.
static inline void value_group(const u8* data, int g, const u8* table, u8* out, int position, int token) {
#if defined(SLIMKV_NEON)
  const uint8x16_t levels = vld1q_u8(table), low_bits = vdupq_n_u8(15);
  u8* to = out + value_offset(position + 8 * g, token);
  for (int t = 0; t < 4; t++) {
    const uint8x16_t x = vld1q_u8(data + 64 * g + 16 * t);
    vst1q_u8(to + 64 * t, vqtbl1q_u8(levels, vandq_u8(x, low_bits)));
    vst1q_u8(to + 64 * t + 16, vqtbl1q_u8(levels, vshrq_n_u8(x, 4)));
  }
#elif defined(SLIMKV_X86)
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  const __m256i low_bits = _mm256_set1_epi8(15);
  u8* to = out + value_offset(position + 8 * g, token);
  for (int t = 0; t < 4; t += 2) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)(data + 64 * g + 16 * t));
    const __m256i low = _mm256_shuffle_epi8(levels, _mm256_and_si256(x, low_bits));
    const __m256i high = _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(x, 4), low_bits));
    _mm256_storeu_si256((__m256i*)(to + 64 * t), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i*)(to + 64 * t + 64), _mm256_permute2x128_si256(low, high, 0x31));
  }
#else
  value_group_plain(data, 4, g, table, out, position, token);
#endif
}

// Calls group(data, v, first, g) for each eighth g of the words of slices [first, first + v): v words per lane.
template <typename Group>
static inline void for_groups(const Side& side, const u8* codes, Group group) {
  alignas(64) u32 nibbles[MAX_DIM / SLICE * LANES];
  const u8* words = nibble_words(side, codes, nibbles);
  const int slices = side.dim / SLICE;
  for (int first = 0, v; first < slices; first += v) {
    v = group_words(slices, first);
    for (int g = 0; g < 8; g++) group(words + 4 * LANES * first, v, first, g);
  }
}

// A tile of K -> bytes [16][stride].
static void unpack_key_bytes(const Side& side, const u8* codes, const u8* table, u8* out, i64 stride) {
  for_groups(side, codes, [&](const u8* data, int v, int first, int g) {
    u8 *low = out + g * stride + SLICE * first, *high = out + (g + 8) * stride + SLICE * first;
    if (v == 4) key_group(data, g, table, low, high);
    else key_group_plain(data, v, g, table, low, high);
  });
}

// A tile of V -> bytes, from `token` of the chunk on.
static void unpack_value_bytes(const Side& side, const u8* codes, const u8* table, u8* out, int token) {
  for_groups(side, codes, [&](const u8* data, int v, int first, int g) {
    if (v == 4) value_group(data, g, table, out, SLICE * first, token);
    else value_group_plain(data, v, g, table, out, SLICE * first, token);
  });
}

// The number that each code of up to 8 bits stands for, before scale and zero (uniform: less `centre`): float32 [256].
static void number_table(const Side& side, int centre, float* table) {
  for (int code = 0; code < 256; code++) {
    if (side.kind == LLOYD) table[code] = side.levels[code & ((1 << side.bits) - 1)];
    else table[code] = side.kind == FP8 ? e4m3_to_float((u8)code) : (float)(code - centre);
  }
}

// One token of a page, value by value -> float32 [dim], before scale and zero.
static void unpack_token(const Side& side, const u8* page, int position, const float* table, float* out) {
  const int dim = side.dim;
  const Piece& first = side.pieces[0];
  const i32* at = first.position + (i64)position * dim;
  if (side.kind == RAW) {
    for (int d = 0; d < dim; d++) {
      const u8* p = page + at[d];
      out[d] = side.bits == 32     ? bits_as<float>(load_u32(p))
          : side.raw_dtype == BF16 ? bf16_to_float((u16)load_u16(p))
                                   : half_to_float((u16)load_u16(p));
    }
    return;
  }
  if (side.piece_count == 1) {
    const u32 mask = (1u << first.width) - 1;
    for (int d = 0; d < dim; d++) out[d] = table[page[at[d]] >> first.shift[d] & mask];
    return;
  }
  u8 codes[MAX_DIM];
  memset(codes, 0, (size_t)dim);
  for (int p = 0; p < side.piece_count; p++) {
    const Piece& piece = side.pieces[p];
    const i32* where = piece.position + (i64)position * dim;
    const u32 mask = (1u << piece.width) - 1;
    for (int d = 0; d < dim; d++) codes[d] |= (u8)((page[where[d]] >> piece.shift[d] & mask) << piece.low_bit);
  }
  for (int d = 0; d < dim; d++) out[d] = table[codes[d]];
}
