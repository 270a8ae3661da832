// The 16 tokens of a score warp of columns.cu: codes in registers, and scales.
#pragma once
#include "latent/wide_tokens.cuh"

constexpr int PARTS = L_BITS > 4 && LD % 256 == 0 ? LD / 128 : 1, OF_PART = LATENT_SLICES / PARTS;  // code parts

// A warp's 16 packed tokens; of their latents, one or two parts at a time. Loads are unconditional, because a condition
// would make them wait. Tokens beyond the sequence come from an arbitrary page; no row sees them.
struct PackedTokens {
  Codes<L_BITS, LATENT_SLICES, false, PARTS> latent[PARTS > 1 ? 2 : 1];
  RopeCodes rope;
  u32 fields[2], rope_fields[2];  // scales of tokens g and g + 8
  const u8* codes;

  DEVICE_MEMBER void load(const u8* page, int place, int lane) {
    codes = page + place / 16 * L_TILE;
    rope.load(page + R_CODES + place / 16 * R_TILE, lane);
    UNROLL_FOR (int i = 0; i < 2; i++) {  // not converted here, because that would wait for the loads
      const int token = place + (lane >> 2) + 8 * i;
      fields[i] = field_bits(page + L_FIELDS, token);
      rope_fields[i] = R_KIND == RAW ? 0 : field_bits(page + R_FIELDS, token);
    }
    load_part<0>(lane);
  }
  template <int P> DEVICE_MEMBER void load_part(int lane) {
    if constexpr (P < PARTS) latent[P % 2].load(codes, lane, P);
  }
  DEVICE_MEMBER void matrices(int k, Table table, const LevelTable& levels, u32 (&a)[4]) const {
    const auto& own = latent[k / OF_PART % 2];
    level_matrices(own.low(k % OF_PART), L_BITS > 4 ? own.high(k % OF_PART) : 0, table, a, levels);
  }
};

typedef TokenScale LaneScales[2];  // for the lane's tokens g and g + 8
