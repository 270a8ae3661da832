// From codes of latents and rope parts in shared memory to MMA operands, for narrow.cu.
#pragma once
#include "latent/codes.cuh"

constexpr int OWN = LATENT_SLICES / WARPS;  // slices of a warp
constexpr bool BY_PAIRS = L_KIND == LLOYD && L_BITS == 4;  // levels are looked up in pairs
// Entries of the LUT: for pairs of 4-bit codes, for bytes of a 6-bit code and two undefined bits, or for single codes.
constexpr int ENTRIES = BY_PAIRS ? PAIR_ENTRIES : L_LEVELS && L_BITS == 6 ? 256 : L_LEVELS;
constexpr int COPIES = 32;  // one per lane, to avoid bank conflicts
constexpr int TOKEN_TILES = KV_BLOCK / 16, OCTETS = KV_BLOCK / 8;

// Regions of shared memory, one after the other: of a KV block, of a team, and of the thread block.
constexpr int ROPE_CODES_AT = TOKEN_TILES * L_TILE, LATENT_FIELDS_AT = ROPE_CODES_AT + TOKEN_TILES * R_TILE,
              ROPE_FIELDS_AT = LATENT_FIELDS_AT + 2 * KV_BLOCK,
              STAGE_BYTES = ROPE_FIELDS_AT + (R_KIND == RAW ? 0 : 2 * KV_BLOCK);
constexpr int SCORES_AT = 0, PROBABILITIES_AT = 256 * KV_BLOCK, WARP_MAX_AT = PROBABILITIES_AT + 2 * ROWS * KV_BLOCK,
              ROW_MAX_AT = WARP_MAX_AT + 16 * ROWS, BARRIERS_AT = ROW_MAX_AT + 4 * ROWS,
              RAISED_AT = BARRIERS_AT + 16 * STAGES, ROPE_SCORES_AT = RAISED_AT + 16,
              RING_AT = ROPE_SCORES_AT + 128 * KV_BLOCK, TEAM_BYTES = RING_AT + STAGES * STAGE_BYTES;
constexpr int QUERIES_AT = 0, ROPE_QUERIES_AT = 2 * ROWS * LD, ROWS_AT = ROPE_QUERIES_AT + 2 * ROWS * RD,
              RANGES_AT = ROWS_AT + 16 * ROWS, ROPE_LEVELS_AT = RANGES_AT + 64,
              LEVELS_AT = ROPE_LEVELS_AT + 4 * COPIES * R_LEVELS, OUTPUT_AT = LEVELS_AT + 4 * COPIES * ENTRIES,
              TEAMS_AT = OUTPUT_AT + 64 * LD;
static_assert(TEAMS_AT + TEAMS * TEAM_BYTES == SHARED_BYTES, "shared memory");

// Word i of the N words of a lane in a plane.
template <int N> DEVICE u32 plane_word(const u8* plane, int lane, int i) {
  return *(const u32*)(plane + Plane<4, 8, false>::place_of_word<N>(i, lane));
}
// Slice s of a plane of W bits: value n is in the low bits of nibble n.
template <int W, int SLICES> DEVICE u32 plane_nibbles(const u8* plane, int lane, int s) {
  const u32 word = plane_word<SLICES * W / 4>(plane, lane, s * W / 4);
  return W == 4 ? word : word >> (s * W % 4) & (W == 2 ? 0x33333333u : 0x11111111u);
}
// low(s) and high(s) of Codes, read from memory.
template <int BITS, int SLICES> DEVICE void read_codes(const u8* tile, int lane, int s, u32& low, u32& high) {
  constexpr int FIRST = BITS >= 4 ? 4 : (BITS >= 2 ? 2 : 1), REST = BITS - FIRST;
  constexpr int TWO_AT = 32 * SLICES * FIRST, ONE_AT = TWO_AT + (REST >= 2 ? 64 * SLICES : 0);
  high = 0;
  if constexpr (BITS == 8) {
    low = plane_word<2 * SLICES>(tile, lane, 2 * s), high = plane_word<2 * SLICES>(tile, lane, 2 * s + 1);
  } else {
    low = plane_nibbles<FIRST, SLICES>(tile, lane, s);
    if (BITS == 3) low |= plane_nibbles<1, SLICES>(tile + ONE_AT, lane, s) << 2;
    if (BITS > 4 && REST >= 2) high = plane_nibbles<2, SLICES>(tile + TWO_AT, lane, s);
    if (BITS > 4 && (REST & 1)) high |= plane_nibbles<1, SLICES>(tile + ONE_AT, lane, s) << (REST >= 2 ? 2 : 0);
  }
}

// Whether a warp's slices are whole words of every plane.
constexpr int SLICES_OF_WORD = L_BITS == 4 ? 1 : (L_BITS == 2 || L_BITS == 6 ? 2 : 4);
constexpr bool WHOLE_WORDS = L_BITS == 8 || LATENT_SLICES % (SLICES_OF_WORD * WARPS) == 0;
// The codes of 16 tokens in the slices of a warp.
struct OwnCodes {
  Codes<L_BITS, LATENT_SLICES, false, WHOLE_WORDS ? WARPS : 1> codes;
  const u8* tile;
  int lane, warp;

  DEVICE_MEMBER void load(const u8* tile_, int lane_, int warp_) {
    tile = tile_, lane = lane_, warp = warp_;
    if constexpr (WHOLE_WORDS) codes.load(tile, lane, warp);
  }
  // Slice i as four matrices (see latent_matrices).
  DEVICE_MEMBER void matrices(int i, Table table, const LevelTable& levels, u32 (&a)[4]) const {
    if constexpr (WHOLE_WORDS && L_LEVELS) {
      u32 words[2];
      codes.template bytes<true>(i, words);
      UNROLL_FOR (int m = 0; m < 4; m++) {
        const int first = m / 2 + 4 * (m % 2), second = first + 2;
        a[m] = prmt(levels.at(words[codes.word_of_byte(first)], codes.place_of_byte(first)),
            levels.at(words[codes.word_of_byte(second)], codes.place_of_byte(second)), 0x5410);
      }
      return;
    }
    u32 low, high = 0;
    if constexpr (!WHOLE_WORDS) {
      read_codes<L_BITS, LATENT_SLICES>(tile, lane, warp * OWN + i, low, high);
    } else {
      low = codes.low(i);
      if constexpr (L_BITS > 4) high = codes.high(i);
    }
    if constexpr (BY_PAIRS) {
      a[0] = levels.at(low, 0), a[1] = levels.at(low, 2), a[2] = levels.at(low, 1), a[3] = levels.at(low, 3);
    } else {
      latent_matrices(low, high, table, levels, a);
    }
  }
};

// ---- LUTs, filled by all threads of a block -------------------------------------------------------------------------

DEVICE void fill_rope_levels(const float* levels, u8* to) {
  for (int i = thread_index(); i < R_LEVELS * COPIES; i += THREADS) ((u32*)to)[i] = f32_to_f16(levels[i / COPIES]);
}
DEVICE void fill_levels(const LatentArgs& args, u8* to, int warp, int lane) {
  if constexpr (BY_PAIRS) {
    for (int entry = 32 * warp; entry < PAIR_ENTRIES; entry += THREADS) {
      u32 first, second;
      code_bytes<LLOYD, 4>((u32)(entry + lane), 0, args.table, first, second);
      const u32 own = pack_f16x2((float)(first & 0xFF) - 63.5f, (float)(first >> 8 & 0xFF) - 63.5f);
      UNROLL_FOR (int i = 0; i < 32; i++) ((u32*)to)[32 * (entry + i) + lane] = shfl(own, i);
    }
  } else {
    for (int i = thread_index(); i < COPIES * ENTRIES; i += THREADS)
      ((u32*)to)[i] = f32_to_f16(args.latent_levels[i / COPIES % at_least_one(L_LEVELS)]);
  }
}
