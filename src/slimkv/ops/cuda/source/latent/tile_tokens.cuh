// 16 tokens of a tile per warp of wide.cu: their codes in registers, then as rows of operands (tokens x 64 dimensions)
// in shared memory.
//
// Codes are loaded in two halves of the dimensions; rope parts and scales belong to the first. While one half is
// unpacked, the other is loaded. All loads share a scoreboard, so waiting for one load waits for all. A half is
// therefore loaded only when no load of the other half is in flight.
#pragma once
#include "latent/wide_tokens.cuh"

constexpr int QUARTER = LATENT_SLICES / 4;  // slices signalled together

struct Tokens {
  Codes<L_BITS, LATENT_SLICES, false, 2> latent[2];
  RopeCodes rope;
  u32 fields[2], rope_fields[2];  // scales of tokens g and g + 8
  const u8* codes;
  int left;  // tokens of the sequence from the warp's first one on

  // Loads are unconditional: a condition would make them wait. Tokens beyond the sequence are arbitrary and masked.
  DEVICE_MEMBER void load_first(const u8* page, u32 place, int left_, int lane) {
    codes = page + place / 16 * L_TILE, left = left_;
    rope.load(page + R_CODES + place / 16 * R_TILE, lane);
    UNROLL_FOR (int i = 0; i < 2; i++) {  // not converted here, because that would wait for the loads
      const int token = place + (lane >> 2) + 8 * i;
      fields[i] = field_bits(page + L_FIELDS, token);
      rope_fields[i] = R_KIND == RAW ? 0 : field_bits(page + R_FIELDS, token);
    }
    latent[0].load(codes, lane, 0);
  }
  DEVICE_MEMBER void load_second(int lane) { latent[1].load(codes, lane, 1); }

  // Writes levels of rope parts to rows at `to` (shared memory), where each 8 KiB has 64 dimensions of 64 tokens, and
  // the scales of tokens from `first` on.
  DEVICE_MEMBER void unpack_rope(Table table, const RopeLevels& levels, u32 to, TokenScales& scales, int first,
      int lane) const {
    const int second = lane % 2, token = lane / 4 + 8 * second;
    const bool real = token < left;
    // All lanes compute the scale, though only two of four store it, because a branch would stall the warp.
    const TokenScale own(real ? second ? fields[1] : fields[0] : 0,
        real ? second ? rope_fields[1] : rope_fields[0] : 0);
    UNROLL_FOR (int s = 0; s < ROPE_SLICES; s++) store_rope(rope, s, table, levels, to, lane);
    if (lane % 4 < 2) scales.put(first + token, own);
  }
  // The same for latents, in quarter Q of the dimensions: the first slice (piece 0), the rest (piece 1), or both.
  template <int Q, int FROM = 0, int TO = 2> DEVICE_MEMBER void unpack_latents(Table table, u32 to, int lane) const {
    const u32 row = operand_row(lane);
    UNROLL_FOR (int s = Q * QUARTER + FROM; s < Q * QUARTER + (TO == 2 ? QUARTER : TO); s++) {
      const auto& own = latent[Q / 2];
      const int k = s % (2 * QUARTER);
      u32 a[4];
      level_matrices(own.low(k), L_BITS > 4 ? own.high(k) : 0, table, a);
      stmatrix_x4<0>(to + s / 4 * 8192 + (row ^ s % 4 * 32), a[0], a[1], a[2], a[3]);
    }
  }
};
