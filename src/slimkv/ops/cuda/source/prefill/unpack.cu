// Unpacks the pages of prefilled sequences, once, into the tiles of attend.cu (tiles.cuh). A block has one tile of a KV
// head, a warp 16 of its tokens, whose codes its lanes hold in the order of docs/design/page-format.md. A lane unpacks
// whole 16-byte units of the tile. Tokens that no query sees, beyond the sequence or before every window, become zeros:
// their pages may hold anything.
//
// Compile-time: D, STEP, EIGHT_BIT, BY_ROW (work.cuh), KEYS_BYTES, VALUES_BYTES (tiles.cuh), BLOCK_SIZE, K_KIND,
// K_BITS, K_FIELDS, V_KIND, V_BITS, V_CODES, V_FIELDS (the pages), LEVELS_K, LEVELS_V (table entries), STAGED_AT
// (shared memory where 8-bit values are combined: a warp has 16 tokens of each of their rows, half a sector).
#include "common/numbers.cuh"
#include "common/codes.cuh"
#include "prefill/tiles.cuh"

constexpr int S = D / 16, WARPS = STEP / 16, FIELD_BIAS = 40;
// The largest value of a tile is below 2^LARGEST_EXPONENT. BY_ROW: units are multiples of 2^UNIT_STEP, so that they
// seldom change, and values 2^24 below the largest are still exact in fp16: the choice of unit has no effect.
constexpr int LARGEST_EXPONENT = BY_ROW ? 15 : 6, UNIT_STEP = BY_ROW ? 2 : 1;
constexpr int K_TILE = 2 * D * K_BITS, V_TILE = 2 * D * V_BITS;

struct UnpackArgs {
  const u8* pages;
  const i32* block_table;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const float* key_levels;  // by code
  const float* value_levels;
  u8* keys;  // [rank, head, tile], from the first tile that a query of the sequence sees on
  u8* values;
  TileScale* tile_scales;
  i64 page_stride, page_head_stride, table_stride;
  i32 num_seqs, num_kv_heads, max_decode_queries, first_tile, tiles, first_rank;
  i32 sliding_window;  // of tokens; longer than any sequence where there is none
  Table key_table;  // EIGHT_BIT: see code_bytes
  Table value_table;  // EIGHT_BIT: the magnitudes of levels as e4m3
  float value_factor;  // EIGHT_BIT: what levels were multiplied by
};

// The tokens of a sequence that its queries see.
struct Seen {
  int begin, end;
  DEVICE_MEMBER bool has(int token) const { return token >= begin && token < end; }
};

// An exponent that no number of a token exceeds: levels are below 2^8, uniform codes below 2^BITS, fp8 below 2^9.
template <int KIND, int BITS> DEVICE int exponent_of(const u8* fields, int place) {
  const u32 scale = field_bits(fields, place);
  int row_max = (int)(scale == INVALID_FIELD ? 0 : scale >> 10) + (KIND == UNIFORM ? BITS : 9);
  if (KIND == UNIFORM) {
    const u32 zero = field_bits(fields + 2 * BLOCK_SIZE, place);
    row_max = max_i32(row_max, (int)(zero == INVALID_FIELD ? 0 : (zero & 0x7FFF) >> 9)) + 2;
  }
  return row_max - FIELD_BIAS;
}

// A token's numbers are scale times theirs plus zero.
struct Field { float scale, zero; };

template <int KIND> DEVICE bool marked(const u8* fields, int place) {
  return field_bits(fields, place) == INVALID_FIELD ||
      (KIND == UNIFORM && field_bits(fields + 2 * BLOCK_SIZE, place) == INVALID_FIELD);
}

template <int KIND> DEVICE Field field_of(const u8* fields, int place, float up) {
  Field f = {scale_of(field_bits(fields, place)) * up, 0.0f};
  if (KIND == UNIFORM) f.zero = zero_of(field_bits(fields + 2 * BLOCK_SIZE, place)) * up;
  return f;
}

// The 8 numbers of a slice: levels, uniform codes or fp8 numbers.
template <int KIND, int BITS, class Codes>
DEVICE void numbers_of(const Codes& codes, int slice, const float* levels, float (&x)[8]) {
  const u32 low = codes.low(slice), high = codes.high(slice);
  UNROLL_FOR (int n = 0; n < 8; n++) {
    const u32 code = code_at<BITS>(low, high, n);
    if (KIND == LLOYD) x[n] = levels[code];
    else if (KIND == UNIFORM) x[n] = as_float(0x4B000000u | code) - 8388608.0f;
    else
      x[n] = as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * 1.3292279957849159e36f;  // 2^120: from e4m3's bias
  }
}

// Keys as bytes, by the warp that has their codes: a lane's four dimensions of a slice are a word of the token's row.
template <class Codes>
DEVICE void store_int8_keys(const UnpackArgs& args, const Codes& codes, bool some, int begin, Seen seen, int warp,
    int lane, u8* keys) {
  const int g = lane >> 2, t = lane & 3;
  UNROLL_FOR (int j = 0; j < D / 64; j++) {
    u32 words[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    UNROLL_FOR (int s = 0; some && s < 4; s++) {
      // Twice the level is 2 (level + 63.5) - 127 = (2 (level + 63.5) + 1) - 128.
      code_bytes<K_KIND, K_BITS>(codes.low(4 * j + s), codes.high(4 * j + s), args.key_table, words[0][s], words[1][s]);
      words[0][s] = words[0][s] << 1 ^ 0x81818181u, words[1][s] = words[1][s] << 1 ^ 0x81818181u;
    }
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const int token = 16 * warp + g + 8 * i;
      const bool real = seen.has(begin + g + 8 * i);
      Words4 unit = {words[i][0], words[i][1], words[i][2], words[i][3]};
      if (!real) unit = {0, 0, 0, 0};
      *(Words4*)(keys + unit_at(0, key_row(token), key_unit(token, 4 * j + t), STEP)) = unit;
    }
  }
}

// Where unit `unit` of row `row` of the values is in shared memory. Rows that lanes store to at a time are 8 apart.
DEVICE int staged_unit(int row, int unit) { return row * STEP + ((unit ^ (row >> 3 & 7)) << 4); }

// The scale of a token's value; 0 where K or V is marked.
DEVICE float value_scale_at(const u8* page, int place) {
  const bool bad = marked<K_KIND>(page + K_FIELDS, place) || marked<V_KIND>(page + V_FIELDS, place);
  return bad ? 0.0f : scale_of(field_bits(page + V_FIELDS, place));
}

// Two digits of unit / scale of a value, as e4m3 (tiles.cuh). Scales below `value_limit` count as that.
struct Digits { u32 first, second; };
DEVICE float e4m3_of(float x, u32& bits) {
  bits = pack_e4m3x2(x, 0.0f) & 0xFF;
  return f16_to_f32(unpack_e4m3x2(bits) & 0xFFFF);
}
DEVICE float digits_of(const u8* page, int place, float value_limit, Digits& digits) {
  const float x = div_rn(value_limit * MOST_QUOTIENT, max_f32(value_scale_at(page, place), value_limit));
  const float first = e4m3_of(x, digits.first);
  return first + e4m3_of((x - first) * 32.0f, digits.second) * 0.03125f;
}

// What the scales of a token become (tiles.cuh), by lanes 0-15 of the warp. Values below `value_limit` count as zero.
DEVICE void store_token_numbers(const UnpackArgs& args, const u8* page, int begin, Seen seen, int place, int warp,
    int lane, float value_limit, u8* keys) {
  if (lane >= 16) return;
  float key = 0.0f, value = 1.0f;
  if (seen.has(begin + lane)) {
    const bool bad = marked<K_KIND>(page + K_FIELDS, place + lane) || marked<V_KIND>(page + V_FIELDS, place + lane);
    key = bad ? NOT_A_NUMBER : scale_of(field_bits(page + K_FIELDS, place + lane)) * 0.5f;
    Digits digits;
    value = div_rn(div_rn(value_limit * MOST_QUOTIENT, digits_of(page, place + lane, value_limit, digits)),
        args.value_factor);
  }
  const int at = 16 * warp + token_place(lane);
  *(float*)(keys + token_number_at(KEY_SCALE, at)) = key;
  *(float*)(keys + token_number_at(VALUE_SCALE, at)) = value;
}

// The rows of digits (tiles.cuh), by lanes 0-15 of the warp.
DEVICE void store_digits(const u8* page, int begin, Seen seen, int place, int warp, int lane, float value_limit,
    u8* staged) {
  if (lane >= 16) return;
  Digits digits = {0, 0};
  if (seen.has(begin + lane)) digits_of(page, place + lane, value_limit, digits);
  UNROLL_FOR (int c = 0; c < 8; c++)
    staged[staged_unit(D + c, warp ^ c) + token_place(lane)] = (u8)(lane % 4 != c / 2 ? 0
            : c % 2                                                                   ? digits.second
                                                                                      : digits.first);
}

// Values as e4m3: a lane's four tokens of a dimension are one word of the dimension's row. `real`: bytes of tokens to
// keep.
template <class Codes>
DEVICE void store_e4m3_values(const UnpackArgs& args, const Codes& codes, bool some, u32 real, int warp, int lane,
    u8* staged) {
  constexpr u32 MAGNITUDE = (1u << (V_BITS - 1)) - 1;
  const int g = lane >> 2, t = lane & 3;
  UNROLL_FOR (int s = 0; s < S; s++) {
    u32 words[2] = {0, 0};
    if (some) {
      // Value 4 m + 2 b + a of a slice is token 8 m + 2 t + b, dimension g + 8 a. This puts the nibbles of a
      // dimension's four tokens side by side.
      const u32 low = codes.low(s), both = (low ^ low >> 4) & 0x00F000F0u;
      const u32 magnitudes = prmt(low ^ both ^ both << 4, 0, 0x3120) & MAGNITUDE * 0x11111111u;
      // By the code without its sign, which is the top bit, set for positive levels.
      words[0] =
          (prmt(args.value_table.low, args.value_table.high, magnitudes) | (~(low << (8 - V_BITS)) & 0x80808080u)) &
          real;
      words[1] = (prmt(args.value_table.low, args.value_table.high, magnitudes >> 16) |
                     (~(low << (4 - V_BITS)) & 0x80808080u)) &
          real;
    }
    UNROLL_FOR (int a = 0; a < 2; a++) {
      const int place = 64 * (s / 4) + 8 * g + 4 * (s % 4 / 2) + 2 * a + s % 2;
      *(u32*)(staged + staged_unit(place, warp ^ (place & 7)) + 4 * t) = words[a];
    }
  }
}

// Units of the keys and values of the whole tile, each an exponent of two.
struct TileExponents { int key, value; };

DEVICE TileExponents tile_exponents(const u8* page, int begin, const Seen& seen, int place, int warp, int lane,
    i32* exponents) {
  i32 key = -FIELD_BIAS, value = -FIELD_BIAS;
  if (seen.has(begin + lane % 16)) {
    key = exponent_of<K_KIND, K_BITS>(page + K_FIELDS, place + lane % 16);
    value = exponent_of<V_KIND, V_BITS>(page + V_FIELDS, place + lane % 16);
  }
  UNROLL_FOR (int d = 8; d; d >>= 1) {
    key = max_i32(key, shfl_xor(key, d));
    value = max_i32(value, shfl_xor(value, d));
  }
  if (lane == 0) exponents[2 * warp] = key, exponents[2 * warp + 1] = value;
  sync_threads();
  UNROLL_FOR (int i = 0; i < WARPS; i++) {
    key = max_i32(key, exponents[2 * i]);
    value = max_i32(value, exponents[2 * i + 1]);
  }
  auto unit = [](int exponent) {
    return (exponent - LARGEST_EXPONENT + 256 + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP - 256;
  };
  return {unit(key), unit(value)};
}

// 16 tokens' keys as halves.
DEVICE void store_fp16_keys(const Codes<K_BITS, S, false>& codes, const Field (&fields)[2], bool some, int begin,
    const Seen& seen, int warp, int lane, const float* levels, u8* keys) {
  const int g = lane >> 2, t = lane & 3;
  float x[8], y[8];
  UNROLL_FOR (int j = 0; j < PLACES / 32; j++) {
    const bool both = 2 * j + 1 < S;  // slices that there are
    if (some) {
      numbers_of<K_KIND, K_BITS>(codes, 2 * j, levels, x);
      if (both) numbers_of<K_KIND, K_BITS>(codes, 2 * j + 1, levels, y);
    }
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const Field f = fields[i];
      Words4 words = {0, 0, 0, 0};
      if (seen.has(begin + g + 8 * i)) {
        u32 pairs[4];
        UNROLL_FOR (int k = 0; k < 4; k++)
          pairs[k] = pack_f16x2(x[4 * i + k] * f.scale + f.zero, both ? y[4 * i + k] * f.scale + f.zero : 0.0f);
        words = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
      *(Words4*)(keys + unit_at(j / 2, 16 * warp + g + 8 * i, 4 * (j % 2) + t, STEP)) = words;
    }
  }
}

// 16 tokens' values as halves.
DEVICE void store_fp16_values(const Codes<V_BITS, S, true>& codes, const Field (&fields)[4], bool some, int begin,
    const Seen& seen, int warp, int lane, const float* levels, u8* values) {
  const int g = lane >> 2, t = lane & 3;
  float x[8], y[8];
  UNROLL_FOR (int h = 0; h < HALVES; h++) {
    u32 words[4][4] = {};
    UNROLL_FOR (int k = 0; k < (h < WHOLE_HALVES ? 2 : 1); k++) {
      const int slice = 4 * h + 2 * k;
      const bool first = slice < S, both = slice + 1 < S;  // slices that there are
      if (some && first) numbers_of<V_KIND, V_BITS>(codes, slice, levels, x);
      if (some && both) numbers_of<V_KIND, V_BITS>(codes, slice + 1, levels, y);
      UNROLL_FOR (int i = 0; first && i < 4; i++) {
        const Field f = fields[i];
        const bool real = seen.has(begin + 2 * t + 8 * (i / 2) + i % 2);
        UNROLL_FOR (int b = 0; b < 2; b++)
          words[i][2 * k + b] =
              real ? pack_f16x2(x[2 * i + b] * f.scale + f.zero, both ? y[2 * i + b] * f.scale + f.zero : 0.0f) : 0;
      }
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
      const int token = 16 * warp + 2 * t + 8 * (i / 2) + i % 2;
      if (h < WHOLE_HALVES)
        *(Words4*)(values + unit_at(h, token, g, STEP)) = {words[i][0], words[i][1], words[i][2], words[i][3]};
      else *(Words2*)(values + unit_at(h, token, g / 2, STEP) + g % 2 * 8) = {words[i][0], words[i][1]};
    }
  }
}

// EIGHT_BIT: a fourth block on a multiprocessor has registers; with a fifth they spill.
KERNEL(32 * WARPS, EIGHT_BIT ? 4 : 3) unpack(GRID_CONSTANT UnpackArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  const int rank = block_index_y(), tile = block_index() / args.num_kv_heads, head = block_index() % args.num_kv_heads;
  pdl_wait();
  const int sequence =
      sequence_of_rank(args.cu_seqlens_q, args.num_seqs, args.max_decode_queries, args.first_rank + rank, lane);
  if (sequence < 0) return;
  const PrefillSequence s = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, sequence);
  const int first = (first_seen_tile(s, args.sliding_window) + args.first_tile + tile) * STEP;
  if (first >= s.length) return;
  i32* exponents = (i32*)shared;  // of the warps' keys and values
  float* key_levels = (float*)shared + 2 * WARPS;
  float* value_levels = key_levels + LEVELS_K;
  for (int i = thread_index(); !EIGHT_BIT && i < LEVELS_K; i += 32 * WARPS) key_levels[i] = args.key_levels[i];
  for (int i = thread_index(); !EIGHT_BIT && i < LEVELS_V; i += 32 * WARPS) value_levels[i] = args.value_levels[i];

  // -- the codes of 16 tokens, which lie in one page
  const int begin = first + 16 * warp, place = begin % BLOCK_SIZE;
  const Seen seen = {first_seen(s, args.sliding_window), s.length};
  const bool some = begin < s.length;
  const i32 page_id =
      ldg_i32(args.block_table + (i64)sequence * args.table_stride + (some ? begin : first) / BLOCK_SIZE);
  const u8* page = args.pages + page_id * args.page_stride + head * args.page_head_stride;
  Codes<K_BITS, S, false> key_codes;
  Codes<V_BITS, S, true> value_codes;
  if (some) {
    key_codes.load(page + place / 16 * K_TILE, lane);
    value_codes.load(page + V_CODES + place / 16 * V_TILE, lane);
  }

  const TileExponents exponent = tile_exponents(page, begin, seen, place, warp, lane, exponents);
  const int key_exponent = EIGHT_BIT ? 0 : exponent.key, value_exponent = exponent.value;
  const float key_up = as_float((u32)(127 - key_exponent) << 23),
              value_up = as_float((u32)(127 - value_exponent) << 23);
  // 2^-12 of the power of two above the tile's largest scale, which is 2^(value_exponent - 2). Smaller scales count as
  // zero.
  const float value_limit = as_float((u32)(127 + value_exponent - 14) << 23);
  const i64 row = ((i64)rank * args.num_kv_heads + head) * args.tiles + tile;
  if (!EIGHT_BIT && thread_index() == 0)
    args.tile_scales[row] = {as_float((u32)(127 + key_exponent) << 23), (float)value_exponent, value_up, 0.0f};
  if (EIGHT_BIT && thread_index() == 0)
    args.tile_scales[row] = {1.0f, 0.0f, div_rn(args.value_factor, value_limit * MOST_QUOTIENT), 0.0f};

  // -- the numbers
  u8* keys = args.keys + row * KEYS_BYTES;
  u8* values = args.values + row * VALUES_BYTES;
  Field of_key[2], of_value[4];
  // NaN shows in the scores of rows that see the token. In its values it would show everywhere: a hidden token's
  // probability is 0, and 0 times NaN is not 0.
  UNROLL_FOR (int i = 0; some && i < 2; i++) {
    const int at = place + g + 8 * i;
    of_key[i] = field_of<K_KIND>(page + K_FIELDS, at, key_up);
    if (marked<K_KIND>(page + K_FIELDS, at) || marked<V_KIND>(page + V_FIELDS, at)) of_key[i].scale = NOT_A_NUMBER;
  }
  UNROLL_FOR (int i = 0; some && i < 4; i++) {
    const int at = place + 2 * t + 8 * (i / 2) + i % 2;
    of_value[i] = field_of<V_KIND>(page + V_FIELDS, at, value_up);
    if (marked<V_KIND>(page + V_FIELDS, at)) of_value[i] = {0.0f, 0.0f};
  }

  if constexpr (EIGHT_BIT) {
    store_int8_keys(args, key_codes, some, begin, seen, warp, lane, keys);
    store_token_numbers(args, page, begin, seen, place, warp, lane, value_limit, keys);
    u32 real = 0;
    UNROLL_FOR (int i = 0; i < 4; i++) {
      const int at = 8 * (i / 2) + 2 * t + i % 2;
      if (seen.has(begin + at) && value_scale_at(page, place + at) >= value_limit) real |= 0xFFu << (8 * i);
    }
    u8* staged = (u8*)shared + STAGED_AT;
    store_e4m3_values(args, value_codes, some, real, warp, lane, staged);
    store_digits(page, begin, seen, place, warp, lane, value_limit, staged);
    sync_threads();
    for (int i = thread_index(); i < VALUES_BYTES / 16; i += 32 * WARPS)
      *(Words4*)(values + 16 * i) = *(const Words4*)(staged + staged_unit(i / 8, i % 8));
  } else {
    store_fp16_keys(key_codes, of_key, some, begin, seen, warp, lane, key_levels, keys);
    store_fp16_values(value_codes, of_value, some, begin, seen, warp, lane, value_levels, values);
  }
}
HOST_TESTABLE(unpack, UnpackArgs)
