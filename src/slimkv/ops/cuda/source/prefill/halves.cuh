// The conversion of codes and fields to fp16.
// Defines: BLOCK_SIZE, K_KIND, K_BITS, K_FIELDS, V_KIND, V_BITS, V_CODES, V_FIELDS (the pages), K_LEVELS, V_LEVELS (LUT
// entries), ONE_TABLE (one LUT for both).
#pragma once
#include "common/codes.cuh"
#include "prefill/args.cuh"

constexpr int S = D / 16, GROUPS = FUSED ? STEP / 64 / PRODUCERS : 1;
constexpr int PER_LANE = STEP < 64 ? 2 : STEP / 32;  // tokens whose fields a lane holds
DEVICE int first_of_lane(int lane) { return STEP < 64 ? PER_LANE * lane % STEP : PER_LANE * lane; }
// Exponents of fields: the bias that is subtracted, the exponent of FIELD_UNIT, and a lower bound, so that nothing
// overflows.
constexpr int FIELD_BIAS = 40, FIELD_SHIFT = 87, LEAST_FIELD = 16;
constexpr int K_TILE = 2 * D * K_BITS, V_TILE = 2 * D * V_BITS;
constexpr int FIELD_ARRAYS = 2 + (K_KIND == UNIFORM) + (V_KIND == UNIFORM), FIELD_BYTES = 2 * STEP;

// The conversion of a format's codes to fp16: level times scale plus, for uniform codes, zero. BY_ROW: the tile's unit
// depends on tokens that a row does not see, yet must not affect its result. Levels then come from a LUT, because the
// rounding of products of denormal numbers would depend on the unit.
template <int KIND, int BITS> struct Format {
  static constexpr bool BY_MAGNITUDE = KIND == LLOYD && BITS <= 4 && !BY_ROW,
                        LOOKED_UP = KIND == LLOYD && !BY_MAGNITUDE;
  // The exponent that the tile's largest scale gets in fp16; for uniform codes, its largest number.
  static constexpr int TOP = LOOKED_UP ? 7 : KIND == FP8 ? 14 : 15;
  // Powers of two that `halves` leaves out: twice a level is a denormal number, and fp8 numbers come out times 2^-8.
  static constexpr int BELOW = BY_MAGNITUDE ? 23 : KIND == FP8 ? 8 : 0;

  // Converts 8 codes of a token: nibble i of `low`, with its upper bits in `high` (at 8 bits: even and odd codes). Word
  // n of the result holds codes n and n + 4.
  DEVICE_MEMBER static void halves(u32 low, u32 high, const Table& table, const LevelTable& levels, u32 scale, u32 zero,
      u32 (&a)[4]) {
    if constexpr (BY_MAGNITUDE) {
      const u32 magnitudes = low & ((1u << (BITS - 1)) - 1) * 0x11111111u;
      const u32 first = prmt(table.low, table.high, magnitudes), second = prmt(table.low, table.high, magnitudes >> 16);
      UNROLL_FOR (int n = 0; n < 4; n++) {
        constexpr int SIGN = 16 - BITS;  // bits from the sign of code 0 to that of a half
        const u32 signs = SIGN >= 4 * n ? low << (SIGN - 4 * n) : low >> (4 * n - SIGN);
        // The permutation's sign mode turns bytes with a clear top bit into zeros.
        a[n] = mul_f16x2(prmt(first, second, 0xC480u + 0x1111u * n) | (~signs & 0x80008000u), scale);
      }
    } else {
      u32 codes[2] = {low, high};  // bytes of codes 0, 2, 4, 6 and of 1, 3, 5, 7
      if (BITS < 8) {
        codes[0] = BITS > 4 ? bit_select(0x0F0F0F0Fu, low, high << 4) : low & 0x0F0F0F0Fu;
        codes[1] = BITS > 4 ? bit_select(0x0F0F0F0Fu, low >> 4, high) : low >> 4 & 0x0F0F0F0Fu;
      }
      UNROLL_FOR (int n = 0; n < 4; n++) {
        const u32 of = codes[n % 2];
        const int at = n / 2;
        if (KIND == LLOYD) {
          a[n] = mul_f16x2(prmt(levels.at(of, at), levels.at(of, at + 2), 0x5410), scale);
        } else if (KIND == UNIFORM) {  // the bits of 1024 + code in fp16
          const u32 x = prmt(of, 0x64646464u, 0x4240u + 0x0101u * at);
          a[n] = fma_f16x2(sub_f16x2(x, 0x64006400u), scale, zero);
        } else {
          const u32 x = prmt(of, 0, 0x2404u + 0x1010u * at);
          a[n] = mul_f16x2((x & 0x80008000u) | (x >> 1 & 0x3F803F80u), scale);
        }
      }
    }
  }
};
typedef Format<K_KIND, K_BITS> KeyFormat;
typedef Format<V_KIND, V_BITS> ValueFormat;

// The fields (scales and zeros of keys and values) of PER_LANE tokens, two per word: as stored in pages, later as fp16.
struct Fields {
  u32 key[PER_LANE / 2], value[PER_LANE / 2], key_zero[PER_LANE / 2], value_zero[PER_LANE / 2];

  DEVICE_MEMBER static void load_side(const u8* fields, int place, u32 (&to)[PER_LANE / 2]) {
    if constexpr (PER_LANE == 4) {
      const Words2 x = *(const Words2*)(fields + 2 * place);
      to[0] = x.x, to[1] = x.y;
    } else {
      to[0] = *(const u32*)(fields + 2 * place);
    }
  }
  // Loads from arrays that lie back to back or, with IN_PAGE, at their offsets in a page.
  template <bool IN_PAGE> DEVICE_MEMBER void load(const u8* from, int place) {
    auto array = [&](int i) { return from + (IN_PAGE ? in_page(i) : i * FIELD_BYTES); };
    load_side(array(0), place, key);
    load_side(array(1), place, value);
    if (K_KIND == UNIFORM) load_side(array(2), place, key_zero);
    if (V_KIND == UNIFORM) load_side(array(FIELD_ARRAYS - 1), place, value_zero);
  }
  // The offset of array `i` in a page.
  DEVICE_MEMBER static int in_page(int i) {
    if (i < 2) return i ? V_FIELDS : K_FIELDS;
    return (i == 2 && K_KIND == UNIFORM ? K_FIELDS : V_FIELDS) + 2 * BLOCK_SIZE;
  }

  // One bit for each of two tokens: whether a field marks it as NaN.
  DEVICE_MEMBER u32 marks(int i) const {
    auto of = [](u32 x) { return ((x & 0xFFFF) == INVALID_FIELD ? 1u : 0u) | (x >> 16 == INVALID_FIELD ? 2u : 0u); };
    u32 found = of(key[i]) | of(value[i]);
    if (K_KIND == UNIFORM) found |= of(key_zero[i]);
    if (V_KIND == UNIFORM) found |= of(value_zero[i]);
    return found;
  }
  DEVICE_MEMBER void clear(int i, u32 others) {
    key[i] &= others, value[i] &= others;
    if (K_KIND == UNIFORM) key_zero[i] &= others;
    if (V_KIND == UNIFORM) value_zero[i] &= others;
  }

  // The largest field of keys or values; for uniform codes, an exponent that bounds their numbers.
  template <int KIND, int BITS> DEVICE_MEMBER static u32 most_of(const u32 (&scales)[PER_LANE / 2],
      const u32 (&zeros)[PER_LANE / 2]) {
    u32 most = scales[0], most_zero = zeros[0] & 0x7FFF7FFFu;
    if (PER_LANE == 4) most = max_u16x2(most, scales[PER_LANE / 2 - 1]);
    most = max_u16x2(most, most >> 16) & 0xFFFF;
    if (KIND != UNIFORM) return most;
    if (PER_LANE == 4) most_zero = max_u16x2(most_zero, zeros[PER_LANE / 2 - 1] & 0x7FFF7FFFu);
    most_zero = max_u16x2(most_zero, most_zero >> 16) & 0xFFFF;
    return (u32)max_i32((int)(most >> 10) + BITS, (int)(most_zero >> 9)) + 2;
  }
  // The largest of the tile: keys in the low half, values in the high half.
  DEVICE_MEMBER u32 most() const {
    return warp_max(most_of<K_KIND, K_BITS>(key, key_zero)) |
        warp_max(most_of<V_KIND, V_BITS>(value, value_zero)) << 16;
  }
};

// Two fields times `up`, which includes FIELD_UNIT, as halves.
DEVICE u32 half_scales(u32 x, float up) {
  return pack_f16x2(small_scale_of(x & 0xFFFF) * up, small_scale_of(x >> 16) * up);
}
DEVICE u32 half_zeros(u32 x, float up) {
  return pack_f16x2(small_zero_of(x & 0xFFFF) * up, small_zero_of(x >> 16) * up);
}

// LUTs of levels as halves, with one copy per lane. Call sync_threads after filling.
struct Levels { LevelTable key, value; };
DEVICE Levels fill_levels(const PrefillArgs& args, u8* to, int threads, int lane) {
  auto fill = [&](const float* levels, u32* table, int entries) {
    for (int i = thread_index(); entries && i < 32 * entries; i += threads) table[i] = f32_to_f16(levels[i / 32]);
  };
  constexpr int VALUES_FROM = ONE_TABLE ? 0 : 32 * K_LEVELS;
  fill(args.key_levels, (u32*)to, K_LEVELS);
  fill(args.value_levels, (u32*)to + VALUES_FROM, ONE_TABLE ? 0 : V_LEVELS);
  const u32 of_lane = shared_address(to) + 4 * lane;
  return {{of_lane}, {of_lane + 4 * VALUES_FROM}};
}
