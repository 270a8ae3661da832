// 16 tokens of a warp: their codes in registers, as operands of the scores, and as rows of values in shared memory.
#pragma once
#include "latent/rope.cuh"
#include "latent_split/shape.cuh"

// The 16-bit fields of tokens g and g + 8 in the halves of a word; zero beyond the sequence.
struct Fields { u32 latent, rope; };

struct Tokens {
  Codes<L_BITS, S, false> latent;
  RopeCodes rope;
  Fields fields;

  // 16 tokens of a page from `place` on, of which the sequence has `left`.
  DEVICE_MEMBER void load(const u8* page, int place, int left, int lane) {
    fields = {0, 0};
    if (left <= 0) return;
    latent.load(page + place / 16 * L_TILE, lane);
    rope.load(page + R_CODES + place / 16 * R_TILE, lane);
    fields.latent = fields_of(page + L_FIELDS, place, left, lane >> 2);
    if (R_KIND != RAW) fields.rope = fields_of(page + R_FIELDS, place, left, lane >> 2);
  }
  // What `load` is going to read of other 16 tokens, on its way to the L2 cache; fields come with them.
  DEVICE_MEMBER static void prefetch(const u8* page, int place, int left, int lane) {
    if (left > 0) prefetch_codes(page, place, lane);
  }

  // Slice s of the latents as an operand: tokens x dimensions.
  DEVICE_MEMBER void latent_operand(int s, Table table, const LevelTable& levels, u32 (&a)[4]) const {
    latent_matrices(latent.low(s), L_BITS > 4 ? latent.high(s) : 0, table, levels, a);
  }

  DEVICE_MEMBER void rope_operand(int s, Table table, const RopeLevels<R_COPIES>& levels, u32 (&a)[4]) const {
    rope.operand(s, table, levels, a);
  }
};

// Where a lane's row of operands is among the rows of values (tokens x 64 dimensions) of its warp's 16 tokens; slice s of a
// chunk is at this ^ 32 s.
DEVICE u32 operand_rows(u32 values, int lane) {
  return values + lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4);
}

// In units of powers of two: at least the base-2 logarithm of a field's scale, less one.
DEVICE float exponent_of(u32 field) { return (float)((int)(field >> 10) - 40); }

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
