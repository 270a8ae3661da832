// Unpacks the codes of pages into a tile of fp16 (tiles.cuh).
//
// A warp unpacks 16 x GROUPS tokens of a tile at a time, whose codes its lanes hold in the order of
// docs/design/page-format.md. A lane writes whole 16-byte units of the tile. Tokens that no query sees become zeros,
// since their pages may hold anything. Every warp reads the fields of all tokens, because they determine the tile's
// units (powers of two).
#pragma once
#include "prefill/halves.cuh"

// A warp that unpacks tokens of a tile.
struct Unpacker {
  const PrefillArgs& args;
  const Work& w;
  Levels levels;
  int warp;  // index of its 16 x GROUPS tokens in the tile
  int lane;

  // The page of the tokens whose fields the lane reads, or of the whole tile if it lies in one page.
  static constexpr bool ONE_PAGE = BLOCK_SIZE % STEP == 0;
  DEVICE_MEMBER i32 page_of(int tile) const {
    const int token = tile * STEP + (ONE_PAGE ? 0 : first_of_lane(lane));
    return token < w.s.length ? ldg_i32(args.block_table + (i64)w.sequence * args.table_stride + token / BLOCK_SIZE)
                              : 0;
  }
  // The page of the tile's token `token`, from the lanes' pages.
  DEVICE_MEMBER static i32 page_with(i32 page, int token) { return ONE_PAGE ? page : shfl(page, token / PER_LANE); }
  DEVICE_MEMBER const u8* page_at(i32 page) const {
    return args.pages + page * args.page_stride + w.head * args.page_head_stride;
  }

  // Clears the fields of hidden tokens, whose pages may hold anything, and of tokens marked as NaN. Returns which of
  // the lane's visible tokens are marked.
  DEVICE_MEMBER u32 clear_hidden(Fields& f, int first) const {
    const int begin = WINDOW ? first_seen(w.s, args.sliding_window) : 0;
    u32 bad = 0;
    UNROLL_FOR (int i = 0; i < PER_LANE; i++) {
      const int token = first + first_of_lane(lane) + i;
      const bool real = token >= begin && token < w.s.length, bad_token = f.marks(i / 2) & (i % 2 ? 2 : 1);
      if (real && bad_token) bad |= 1u << i;
      if (!real || bad_token) f.clear(i / 2, i % 2 ? 0x0000FFFFu : 0xFFFF0000u);
    }
    return bad;
  }

  // Converts fields to fp16 in units of the tile, and returns these units. A marked token gets a NaN key, which affects
  // only rows that see it. A NaN value would affect all rows, since even a probability of 0 times NaN is NaN.
  DEVICE_MEMBER TileScale scale(Fields& f, int tile) const {
    const int first = tile * STEP;
    u32 bad = 0, most = f.most();
    bool clear = (!WINDOW || first >= w.s.length - w.s.queries - args.sliding_window + 1) && first + STEP <= w.s.length;
    if (K_KIND == UNIFORM || V_KIND == UNIFORM) {
      u32 marks = 0;
      UNROLL_FOR (int i = 0; i < PER_LANE / 2; i++) marks |= f.marks(i);
      clear = clear && !warp_any(marks);
    } else {
      clear = clear && (most & 0xFFFF) != INVALID_FIELD && most >> 16 != INVALID_FIELD;
    }
    if (!clear) {
      bad = clear_hidden(f, first);
      most = f.most();
    }
    const int key_most = (int)(K_KIND == UNIFORM ? most & 0xFFFF : most >> 10 & 63),
              value_most = (int)(V_KIND == UNIFORM ? most >> 16 : most >> 26);
    const int key_exponent = max_i32(key_most, LEAST_FIELD) - FIELD_BIAS;
    int value_exponent = max_i32(value_most, LEAST_FIELD) - FIELD_BIAS;
    if (BY_ROW) value_exponent += value_exponent & 1;  // so that units seldom change
    const float key_up = as_float((u32)(127 + FIELD_SHIFT + KeyFormat::TOP - key_exponent) << 23);
    const float value_up = as_float((u32)(127 + FIELD_SHIFT + ValueFormat::TOP - value_exponent) << 23);
    UNROLL_FOR (int i = 0; i < PER_LANE / 2; i++) {
      f.key[i] = half_scales(f.key[i], key_up), f.value[i] = half_scales(f.value[i], value_up);
      if (K_KIND == UNIFORM) f.key_zero[i] = half_zeros(f.key_zero[i], key_up);
      if (V_KIND == UNIFORM) f.value_zero[i] = half_zeros(f.value_zero[i], value_up);
    }
    if (bad)
      UNROLL_FOR (int i = 0; i < PER_LANE; i++)
        if (bad >> i & 1) f.key[i / 2] |= i % 2 ? 0x7FFF0000u : 0x7FFFu;
    const int key_unit = key_exponent - KeyFormat::TOP + KeyFormat::BELOW;
    const int value_unit = value_exponent - ValueFormat::TOP + ValueFormat::BELOW;
    return {as_float((u32)(127 + key_unit) << 23), (float)value_unit, as_float((u32)(127 - value_unit) << 23), 0.0f};
  }

  // Halves of PER_LANE tokens, from the lane that holds them. twice(i): half i, duplicated into both halves of a word.
  struct Halves {
    u32 low, high;
    DEVICE_MEMBER u32 twice(u32 i) const { return prmt(low, high, 0x1010u + 0x2222u * i); }
  };
  DEVICE_MEMBER static Halves halves_from(const u32 (&halves)[PER_LANE / 2], u32 from) {
    return {shfl(halves[0], (int)from), PER_LANE == 4 ? shfl(halves[PER_LANE / 2 - 1], (int)from) : 0};
  }

  DEVICE_MEMBER void store_keys(const Codes<K_BITS, S, false> (&codes)[GROUPS], const Fields& f, u8* keys) const {
    const int own = read_laneid(), g = own >> 2, t = own & 3;  // recomputed, so that it occupies no registers
    const int first = FUSED ? 2 * t : t, second = FUSED ? 2 * t + 1 : t + 4;  // units of 32 dimensions and of the next
    u8* const units[2] = {keys + unit_at(0, 16 * GROUPS * warp + g, first, STEP),
        keys + unit_at(0, 16 * GROUPS * warp + g, second, STEP)};
    u8* const rest = keys + unit_at(0, 16 * GROUPS * warp + g, t, STEP);  // for a remainder of 32 dimensions
    UNROLL_FOR (int q = 0; q < GROUPS; q++) {
      u32 scale[2], zero[2] = {0, 0};
      UNROLL_FOR (int i = 0; i < 2; i++) {
        const u32 from = (u32)(16 * GROUPS * warp + g) / PER_LANE + (16 * q + 8 * i) / PER_LANE,
                  which = (u32)g % PER_LANE;
        scale[i] = halves_from(f.key, from).twice(which);
        if (K_KIND == UNIFORM) zero[i] = halves_from(f.key_zero, from).twice(which);
      }
      UNROLL_FOR (int j = 0; j < PLACES / 32; j++) {
        const bool both = 2 * j + 1 < S;  // whether both slices exist
        const u32 low[2] = {codes[q].low(2 * j), both ? codes[q].low(2 * j + 1) : 0};
        const u32 high[2] = {codes[q].high(2 * j), both ? codes[q].high(2 * j + 1) : 0};
        UNROLL_FOR (int i = 0; i < 2; i++) {
          u32 a[4];
          if constexpr (K_BITS == 8) {
            const u32 even = i ? high[0] : low[0], odd = i ? high[1] : low[1];  // slices
            KeyFormat::halves(prmt(even, odd, 0x6420), prmt(even, odd, 0x7531), args.key_table, levels.key, scale[i],
                zero[i], a);
          } else {
            const u32 token = i ? 0x7632 : 0x5410;
            KeyFormat::halves(prmt(low[0], low[1], token), K_BITS > 4 ? prmt(high[0], high[1], token) : 0,
                args.key_table, levels.key, scale[i], zero[i], a);
          }
          UNROLL_FOR (int n = 0; !both && n < 4; n++) a[n] &= 0xFFFFu;
          *(Words4*)((j / 2 < WHOLE_HALVES ? units[j % 2] : rest) + unit_at(j / 2, 16 * q + 8 * i, 0, STEP)) = {a[0],
              a[1], a[2], a[3]};
        }
      }
    }
  }

  // Transposes the bytes of four words: from a byte per token to a word per token.
  DEVICE_MEMBER static void turn(u32 (&x)[4]) {
    const u32 low[2] = {prmt(x[0], x[1], 0x5140), prmt(x[2], x[3], 0x5140)},
              high[2] = {prmt(x[0], x[1], 0x7362), prmt(x[2], x[3], 0x7362)};
    x[0] = prmt(low[0], low[1], 0x5140), x[1] = prmt(low[0], low[1], 0x7362);
    x[2] = prmt(high[0], high[1], 0x5140), x[3] = prmt(high[0], high[1], 0x7362);
  }

  DEVICE_MEMBER void store_values(const Codes<V_BITS, S, true> (&codes)[GROUPS], const Fields& f, u8* values) const {
    const int own = read_laneid(), g = own >> 2, t = own & 3;  // recomputed, so that it occupies no registers
    u8* const units[2] = {values + unit_at(0, 16 * GROUPS * warp + 2 * t, g, STEP),
        values + unit_at(0, 16 * GROUPS * warp + 2 * t + 1, g, STEP)};
    u8* const rest[2] = {values + unit_at(0, 16 * GROUPS * warp + 2 * t, g / 2, STEP) + g % 2 * 8,
        values + unit_at(0, 16 * GROUPS * warp + 2 * t + 1, g / 2, STEP) + g % 2 * 8};
    UNROLL_FOR (int q = 0; q < GROUPS; q++) {
      u32 scale[4], zero[4] = {0, 0, 0, 0};
      UNROLL_FOR (int i = 0; i < 4; i += 2) {
        const u32 from = (u32)(16 * GROUPS * warp + 2 * t) / PER_LANE + (16 * q + 4 * i) / PER_LANE,
                  which = (u32)(2 * t) % PER_LANE;
        const Halves scales = halves_from(f.value, from);
        scale[i] = scales.twice(which), scale[i + 1] = scales.twice(which + 1);
        if (V_KIND == UNIFORM) {
          const Halves zeros = halves_from(f.value_zero, from);
          zero[i] = zeros.twice(which), zero[i + 1] = zeros.twice(which + 1);
        }
      }
      UNROLL_FOR (int h = 0; h < HALVES; h++) {
        u32 low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        UNROLL_FOR (int k = 0; k < 4; k++)
          if (4 * h + k < S) low[k] = codes[q].low(4 * h + k), high[k] = codes[q].high(4 * h + k);
        if constexpr (V_BITS < 8) {
          turn(low);
          if (V_BITS > 4) turn(high);
        }
        UNROLL_FOR (int i = 0; i < 4; i++) {
          u32 a[4];
          if constexpr (V_BITS == 8) {
            const u32 token = i % 2 ? 0x7632 : 0x5410;
            const u32 even = i / 2 ? prmt(high[0], high[2], token) : prmt(low[0], low[2], token);
            const u32 odd = i / 2 ? prmt(high[1], high[3], token) : prmt(low[1], low[3], token);
            ValueFormat::halves(prmt(even, odd, 0x6420), prmt(even, odd, 0x7531), args.value_table, levels.value,
                scale[i], zero[i], a);
          } else {
            ValueFormat::halves(low[i], high[i], args.value_table, levels.value, scale[i], zero[i], a);
          }
          UNROLL_FOR (int n = 0; n < 4; n++)
            if (4 * h + n / 2 * 2 + 1 >= S) a[n] &= 0xFFFFu;
          const int row = unit_at(h, 16 * q + 8 * (i / 2), 0, STEP);
          if (h < WHOLE_HALVES) *(Words4*)(units[i % 2] + row) = {a[0], a[1], a[2], a[3]};
          else *(Words2*)(rest[i % 2] + row) = {a[0], a[1]};
        }
      }
    }
  }
};

constexpr int GROUPS_OF_TILE = STEP / 16;

// One warp: unpacks groups `group` to `end_group` of 16 tokens of a tile into the workspace.
DEVICE void unpack_groups(const PrefillArgs& args, const Work& w, const Levels& levels, int tile, int group,
    int end_group, int lane) {
  Unpacker unpacker = {args, w, levels, 0, lane};
  const i64 row = tiles_of(args, w) + tile;
  const i32 page = unpacker.page_of(tile);
  const u8* const own_page = unpacker.page_at(page);
  const int own_token = first_of_lane(lane), own_place = (tile * STEP + own_token) % BLOCK_SIZE;
  if (own_token / 16 >= group && own_token / 16 < end_group) {  // prefetches its tokens' codes to L2
    constexpr int K_PART = PER_LANE * K_TILE / 16, V_PART = PER_LANE * V_TILE / 16;
    UNROLL_FOR (int i = 0; i < K_PART; i += 128) prefetch_l2(own_page + own_place / PER_LANE * K_PART + i);
    UNROLL_FOR (int i = 0; i < V_PART; i += 128) prefetch_l2(own_page + V_CODES + own_place / PER_LANE * V_PART + i);
  }
  Fields fields;
  fields.load<true>(own_page, own_place);
  const TileScale unit = unpacker.scale(fields, tile);
  if (group == 0 && lane == 0) args.tile_scales[row] = unit;
#pragma unroll 1
  for (; group < end_group; group++) {
    unpacker.warp = group;
    const u8* const from = unpacker.page_at(Unpacker::page_with(page, 16 * group));
    const int place = (tile * STEP + 16 * group) % BLOCK_SIZE / 16;
    Codes<K_BITS, S, false> key_codes[GROUPS];
    key_codes[0].load(from + place * K_TILE, lane);
    unpacker.store_keys(key_codes, fields, args.keys + row * KEYS_BYTES);
    sync_warp();  // loads values only after the registers of keys are free
    Codes<V_BITS, S, true> value_codes[GROUPS];
    value_codes[0].load(from + V_CODES + place * V_TILE, lane);
    unpacker.store_values(value_codes, fields, args.values + row * VALUES_BYTES);
  }
}
