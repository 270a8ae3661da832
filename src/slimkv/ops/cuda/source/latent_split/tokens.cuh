// 16 tokens of a warp: their codes in registers, as operands of the scores, and as rows of values in shared memory.
#pragma once
#include "latent_split/shape.cuh"

// Levels of the rope part, in R_COPIES copies.
struct RopeLevels {
  u32 address;
  DEVICE_MEMBER u32 at(u32 word, int i) const {
    return ld_shared_constant(dp4a_u8(word, (u32)(4 * R_COPIES) << (8 * i), address));
  }
};

template <int COUNT, int COPIES> DEVICE void fill_levels(const float* levels, u8* to) {
  for (int i = thread_index(); i < COUNT * COPIES; i += THREADS) ((u32*)to)[i] = f32_to_f16(levels[i / COPIES]);
}

// The 16-bit fields of tokens g and g + 8 in the halves of a word; zero beyond the sequence.
struct Fields { u32 latent, rope; };

struct Tokens {
  Codes<L_BITS, S, false> latent;
  static constexpr int ROPE_WORDS = R_BITS % 8 ? 2 * ROPE_SLICES : ROPE_SLICES * R_BITS / 4;  // codes of 6 and 7 bits as bytes
  u32 rope[ROPE_WORDS];
  Fields fields;

  // 16 tokens of a page from `place` on, of which the sequence has `left`.
  DEVICE_MEMBER void load(const u8* page, int place, int left, int lane) {
    fields = {0, 0};
    if (left <= 0) return;
    latent.load(page + place / 16 * L_TILE, lane);
    load_rope(page + R_CODES + place / 16 * R_TILE, lane);
    fields.latent = fields_of(page + L_FIELDS, place, left, lane >> 2);
    if (R_KIND != RAW) fields.rope = fields_of(page + R_FIELDS, place, left, lane >> 2);
  }
  // What `load` is going to read of other 16 tokens, on its way to the L2 cache.
  DEVICE_MEMBER static void prefetch(const u8* page, int place, int left, int lane) {
    if (left <= 0) return;
    const u8* latents = page + place / 16 * L_TILE;
    const u8* ropes = page + R_CODES + place / 16 * R_TILE;
#pragma unroll
    for (int at = 0; at < L_TILE; at += 32 * 128)
      if (at + 128 * lane < L_TILE) prefetch_l2(latents + at + 128 * lane);
    if (128 * lane < R_TILE) prefetch_l2(ropes + 128 * lane);
  }
  DEVICE_MEMBER static u32 fields_of(const u8* fields, int place, int left, int g) {
    const u32 low = g < left ? field_bits(fields, place + g) : 0, high = g + 8 < left ? field_bits(fields, place + g + 8) : 0;
    return low | high << 16;
  }
  DEVICE_MEMBER void load_rope(const u8* tile, int lane) {
    if constexpr (R_BITS % 8 == 0) {
      Plane<4, 8>::load_words<ROPE_WORDS>(tile, lane, rope);
    } else {
      Codes<(R_BITS < 8 ? R_BITS : 7), ROPE_SLICES, true> codes;
      codes.load(tile, lane);
#pragma unroll
      for (int s = 0; s < ROPE_SLICES; s++) set_codes(s, codes.low(s), codes.high(s));
    }
  }
  DEVICE_MEMBER void set_codes(int s, u32 low, u32 high) {
    const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4, odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
    rope[2 * s] = prmt(even, odd, 0x5140), rope[2 * s + 1] = prmt(even, odd, 0x7362);
  }

  // Slice s of the latents as an operand: tokens x dimensions.
  DEVICE_MEMBER void latent_operand(int s, Table table, const LevelTable& levels, u32 (&a)[4]) const {
    const u32 low = latent.low(s), high = L_BITS > 4 ? latent.high(s) : 0;
    if constexpr (IN_BYTES) {
      u32 first, second;
      code_bytes<LLOYD, L_BITS>(low, high, table, first, second);
      const u32 base = 0x64646464u, less = 0x643F643Fu;  // 1024 + level + 63.5, less 1087
      a[0] = sub_f16x2(prmt(first, base, 0x4140), less), a[2] = sub_f16x2(prmt(first, base, 0x4342), less);
      a[1] = sub_f16x2(prmt(second, base, 0x4140), less), a[3] = sub_f16x2(prmt(second, base, 0x4342), less);
    } else {
      code_halves<L_KIND, L_BITS, false>(low, high, table, levels, a);
    }
  }

  // Slice s of the rope parts, which pages have dimensions x tokens, as an operand: tokens x dimensions.
  DEVICE_MEMBER void rope_operand(int s, Table table, const RopeLevels& levels, u32 (&a)[4]) const {
    u32 v[4];
    if constexpr (R_KIND == RAW) {
      const u32* w = rope + 4 * s;  // a token's dimensions g and g + 8
      v[0] = prmt(w[0], w[1], 0x5410), v[1] = prmt(w[0], w[1], 0x7632);
      v[2] = prmt(w[2], w[3], 0x5410), v[3] = prmt(w[2], w[3], 0x7632);
    } else {
      code_halves<R_KIND, 8, true>(rope[2 * s], rope[2 * s + 1], table, levels, v);
    }
    a[0] = movmatrix_trans(v[0]), a[1] = movmatrix_trans(v[2]);
    a[2] = movmatrix_trans(v[1]), a[3] = movmatrix_trans(v[3]);
  }
};

// Where a lane's row of operands is among the rows of values (tokens x 64 dimensions) of its warp's 16 tokens; slice s of a
// chunk is at this ^ 32 s.
DEVICE u32 operand_rows(u32 values, int lane) {
  return values + lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}

// In units of powers of two: at least the base-2 logarithm of a field's scale, less one.
DEVICE float exponent_of(u32 field) { return (float)((int)(field >> 10) - 40); }
DEVICE float marked_scale(u32 field) { return field == INVALID_FIELD ? NOT_A_NUMBER : scale_of(field); }

// Scales of tokens g and g + 8: of the latent as a value, as a key, and of the rope part in units of that.
struct Scales {
  float value[2], key[2], rope[2];

  DEVICE_MEMBER explicit Scales(const Fields& fields) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      value[i] = marked_scale(fields.latent >> (16 * i) & 0xFFFF);
      const float own = R_KIND == RAW ? 1.0f : marked_scale(fields.rope >> (16 * i) & 0xFFFF);
      // A latent of zeros has a scale of zero; one that is small enough does as well, and the rope part can be told in it.
      const float least = max_f32(max_f32(value[i], own * 8.6736174e-19f), 7.8886091e-31f);  // 2^-60, 2^-100
      key[i] = value[i] == value[i] ? least : value[i];
      rope[i] = own * rcp_approx(least);
    }
  }
};
