// Unpacks the codes of pages, Lloyd-Max of up to 4 bits, into a tile of bytes (tiles.cuh).
//
// A warp unpacks 16 tokens of a tile, whose codes its lanes hold in the order of docs/design/page-format.md. Its 16
// tokens are only half a sector of a value row, so rows are assembled in shared memory. Tokens that no query
// sees become zeros, since their pages may hold anything. Defines: BLOCK_SIZE, K_BITS, K_FIELDS, V_BITS, V_CODES,
// V_FIELDS (the pages), STAGED_AT (offset of the value rows in shared memory, after a word per warp). Tables: for keys
// as in code_bytes; for values the magnitudes of levels times value_factor, as e4m3 (INTEGERS: times 2, as integers).
#pragma once
#include "common/numbers.cuh"
#include "prefill/args.cuh"

constexpr int S = D / 16, WARPS = STEP / 16, K_TILE = 2 * D * K_BITS, V_TILE = 2 * D * V_BITS;
static_assert(K_KIND == LLOYD && K_BITS <= 4 && V_KIND == LLOYD && V_BITS <= 4, "levels are bytes");

// The offset in shared memory of unit `unit` of row `row` of the values. Lanes store concurrently to rows 8 apart.
DEVICE int staged_unit(int row, int unit) { return row * STEP + ((unit ^ (row >> 3 & 7)) << 4); }

// Two e4m3 digits of unit / scale of a value (tiles.cuh), and the number that they represent.
struct Digits {
  u32 first, second;
  float number;

  DEVICE_MEMBER static float round(float x, u32& bits) {
    bits = pack_e4m3x2(x, 0.0f) & 0xFF;
    return f16_to_f32(unpack_e4m3x2(bits) & 0xFFFF);
  }
  DEVICE_MEMBER explicit Digits(float x) {
    const float high = round(x, first);
    number = high + round((x - high) * 32.0f, second) * 0.03125f;
  }
};

// 16 tokens of a tile, starting at token `begin` of the sequence, which has index `place` in its page.
struct TokenBytes {
  const PrefillArgs& args;
  const u8* page;
  int begin, place, seen_begin, seen_end, warp, lane;
  float value_limit;  // smaller scales of values count as zero
  float most_value;  // INTEGERS: the largest scale of the tile
  bool uneven;  // INTEGERS: another scale is much smaller

  DEVICE_MEMBER bool sees(int i) const { return begin + i >= seen_begin && begin + i < seen_end; }
  DEVICE_MEMBER u32 key_field(int i) const { return field_bits(page + K_FIELDS, place + i); }
  DEVICE_MEMBER u32 value_field(int i) const { return field_bits(page + V_FIELDS, place + i); }
  DEVICE_MEMBER bool marked(int i) const { return key_field(i) == INVALID_FIELD || value_field(i) == INVALID_FIELD; }
  // 0 if K or V is marked as NaN.
  DEVICE_MEMBER float value_scale(int i) const { return marked(i) ? 0.0f : scale_of(value_field(i)); }
  DEVICE_MEMBER Digits digits(int i) const {
    return Digits(div_rn(value_limit * MOST_QUOTIENT, max_f32(value_scale(i), value_limit)));
  }

  // Sets value_limit: 2^-12 times the power of two above the tile's largest scale. `fields`: a shared word per warp.
  DEVICE_MEMBER void find_value_limit(u32* fields) {
    const bool counts = sees(lane % 16) && value_field(lane % 16) != INVALID_FIELD;
    u32 most = warp_max(counts ? value_field(lane % 16) : 0);
    most |= warp_max(counts ? 0xFFFF - value_field(lane % 16) : 0) << 16;  // and the smallest
    if (lane == 0) fields[warp] = most;
    sync_threads();
    UNROLL_FOR (int i = 0; i < WARPS; i++) most = max_u16x2(most, fields[i]);
    const float least = scale_of(0xFFFF - (most >> 16));
    most &= 0xFFFF;
    // An exponent field of 40 is a scale of at least 1.
    value_limit = INTEGERS ? 0.0f : as_float((127 - 51 + (most >> 10)) << 23);
    most_value = scale_of(max_u32(most, 1 << 10));  // not 0
    uneven = least < UNEVEN * most_value;
  }

  // A lane's four dimensions of a slice are a word of the token's row.
  template <class Codes> DEVICE_MEMBER void store_keys(const Codes& codes, bool some, u8* keys) const {
    const int g = lane >> 2, t = lane & 3;
    UNROLL_FOR (int j = 0; j < D / 64; j++) {
      u32 words[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
      UNROLL_FOR (int s = 0; some && s < 4; s++) {
        // Twice the level is 2 (level + 63.5) - 127 = (2 (level + 63.5) + 1) - 128.
        code_bytes<LLOYD, K_BITS>(codes.low(4 * j + s), codes.high(4 * j + s), args.key_table, words[0][s],
            words[1][s]);
        words[0][s] = words[0][s] << 1 ^ 0x81818181u, words[1][s] = words[1][s] << 1 ^ 0x81818181u;
      }
      UNROLL_FOR (int i = 0; i < 2; i++) {
        const int token = 16 * warp + g + 8 * i;
        Words4 unit = {words[i][0], words[i][1], words[i][2], words[i][3]};
        if (!sees(g + 8 * i)) unit = {0, 0, 0, 0};
        *(Words4*)(keys + unit_at(j / 2, key_row(token), key_unit(token, 4 * (j % 2) + t), STEP)) = unit;
      }
    }
  }

  // Lanes 0-15 write the tokens' factors and the rows of digits. A marked token gets a NaN key, which affects only rows
  // that see it. A NaN value would affect all rows, since even a probability of 0 times NaN is NaN.
  DEVICE_MEMBER void store_scales(u8* keys, u8* staged) const {
    if (lane >= 16) return;
    float key = 0.0f, value = 1.0f;
    u32 bytes[2] = {0, 0};
    if (sees(lane)) {
      const Digits quotient = digits(lane);
      key = marked(lane) ? NOT_A_NUMBER : scale_of(key_field(lane)) * 0.5f;
      if (INTEGERS) value = div_rn(255.0f * value_scale(lane), most_value);
      else value = div_rn(div_rn(value_limit * MOST_QUOTIENT, quotient.number), args.value_factor);
      bytes[0] = quotient.first, bytes[1] = quotient.second;
    }
    const int at = 16 * warp + token_place(lane);
    *(float*)(keys + token_number_at(KEY_SCALE, at)) = key;
    *(float*)(keys + token_number_at(VALUE_SCALE, at)) = value;
    UNROLL_FOR (int c = 0; !INTEGERS && c < 8; c++)
      staged[staged_unit(D + c, warp ^ c) + token_place(lane)] = (u8)(lane % 4 == c / 2 ? bytes[c % 2] : 0);
  }

  // A lane's four tokens of a dimension are one word of the dimension's row.
  template <class Codes> DEVICE_MEMBER void store_values(const Codes& codes, bool some, u8* staged) const {
    constexpr u32 MAGNITUDE = (1u << (V_BITS - 1)) - 1;
    const int g = lane >> 2, t = lane & 3;
    u32 real = 0;  // bytes of tokens to keep
    UNROLL_FOR (int i = 0; i < 4; i++) {
      const int at = 8 * (i / 2) + 2 * t + i % 2;
      if (sees(at) && value_scale(at) >= value_limit) real |= 0xFFu << (8 * i);
    }
    UNROLL_FOR (int s = 0; s < S; s++) {
      u32 words[2] = {0, 0};
      if (some) {
        // Value 4 m + 2 b + a of a slice is token 8 m + 2 t + b, dimension g + 8 a. This makes the nibbles of a
        // dimension's four tokens adjacent.
        const u32 low = codes.low(s), both = (low ^ low >> 4) & 0x00F000F0u;
        const u32 magnitudes = prmt(low ^ both ^ both << 4, 0, 0x3120) & MAGNITUDE * 0x11111111u;
        // Looks up the code without its sign, the top bit, which is set for positive levels.
        UNROLL_FOR (int a = 0; a < 2; a++) {
          const u32 negative = ~(low << (8 - 4 * a - V_BITS)) & 0x80808080u;
          // The negative of an odd integer differs from it in all bits but the lowest.
          words[a] = real &
              (prmt(args.value_table.low, args.value_table.high, magnitudes >> 16 * a) ^
                  (INTEGERS ? negative | (negative - (negative >> 6)) : negative));
        }
      }
      UNROLL_FOR (int a = 0; a < 2; a++) {
        const int place = 64 * (s / 4) + 8 * g + 4 * (s % 4 / 2) + 2 * a + s % 2;
        *(u32*)(staged + staged_unit(place, warp ^ (place & 7)) + 4 * t) = words[a];
      }
    }
  }
};

// Unpacks a tile, with all warps of the block.
DEVICE void unpack_bytes(const PrefillArgs& args, const Work& w, int tile, u8* shared, int warp, int lane) {
  const int begin = tile * STEP + 16 * warp, place = begin % BLOCK_SIZE;
  const bool some = begin < w.s.length;
  const i32 page =
      ldg_i32(args.block_table + (i64)w.sequence * args.table_stride + (some ? begin : tile * STEP) / BLOCK_SIZE);
  TokenBytes tokens = {args, args.pages + page * args.page_stride + w.head * args.page_head_stride, begin, place,
      first_seen(w.s, args.sliding_window), w.s.length, warp, lane};
  Codes<K_BITS, S, false> key_codes;
  Codes<V_BITS, S, true> value_codes;
  if (some) {
    key_codes.load(tokens.page + place / 16 * K_TILE, lane);
    value_codes.load(tokens.page + V_CODES + place / 16 * V_TILE, lane);
  }
  tokens.find_value_limit((u32*)shared);
  const i64 row = tiles_of(args, w) + tile;
  if (thread_index() == 0)
    args.tile_scales[row] = {1.0f, INTEGERS ? div_rn(tokens.most_value * (tokens.uneven ? -0.5f : 0.5f), 255.0f) : 0.0f,
        div_rn(args.value_factor, tokens.value_limit * MOST_QUOTIENT), 0.0f};
  u8* const staged = shared + STAGED_AT;
  tokens.store_keys(key_codes, some, args.keys + row * KEYS_BYTES);
  tokens.store_scales(args.keys + row * KEYS_BYTES, staged);
  tokens.store_values(value_codes, some, staged);
  sync_threads();
  for (int i = thread_index(); i < VALUES_BYTES / 16; i += 32 * WARPS)
    *(Words4*)(args.values + row * VALUES_BYTES + 16 * i) = *(
        const Words4*)(staged + staged_unit(i / 8 % (VALUES_BYTES / STEP), i % 8 + i / (VALUES_BYTES * 8 / STEP) * 8));
}
