// 16 single tokens of a warp of wide.cu, anywhere in pages of token rows (sparse attention): 4-bit codes and rope parts of
// 16 bits in registers, and as rows of operands (tokens x 64 dimensions) in shared memory. A token is a row of ROW_STRIDE
// bytes; the block table has its slot, and none where it is negative.
#pragma once
#include "latent/wide_tokens.cuh"

// A lane has tokens g and g + 8 of the 16, of both the quarter of every quarter of the dimensions that is number t.
struct RowTokens {
  static constexpr int WORDS = LD / 128;  // of a quarter: 8 codes each, which make 16 bytes of an operand
  u32 latent[2][4][WORDS];
  Words4 rope[2][2];
  u32 fields[2];
  static constexpr u32 SKIPPED = 0x10000;  // instead of a field

  // Slots of the lane's tokens.
  struct Place { i32 slot[2]; };
  DEVICE_MEMBER static Place place(const i32* table, int token, int length, int lane) {
    Place place;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = token + lane / 4 + 8 * i;
      place.slot[i] = at < length ? ldg_i32(table + at) : -1;
    }
    return place;
  }
  DEVICE_MEMBER void load(const LatentArgs& args, Place place, int, int, int lane) {
    const int t = lane & 3, odd = lane >> 2 & 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool skipped = place.slot[i] < 0;
      const u32 slot = skipped ? 0 : place.slot[i];
      const u8* const page = args.pages + (i64)(slot / BLOCK_SIZE) * args.page_stride;
      const u8* const row = page + slot % BLOCK_SIZE * ROW_STRIDE;
#pragma unroll
      for (int q = 0; q < 4; q++) {  // codes of a skipped token are some token's, and its score is minus infinity
        const u8* const own = row + q * (LD / 8) + t * (LD / 32);
        u32* const to = latent[i][q];
        if constexpr (WORDS == 4) {
          const Words4 x = *(const Words4*)own;
          to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        } else {
#pragma unroll
          for (int k = 0; k < WORDS; k++) to[k] = ((const u32*)own)[k];
        }
      }
      // The first half of an even token's rope part beside the second half of an odd one's: no bank is used twice.
      rope[i][0] = *(const Words4*)(row + R_CODES + 16 * (t + 4 * odd));
      rope[i][1] = *(const Words4*)(row + R_CODES + 16 * (t + 4 * (1 - odd)));
      fields[i] = skipped ? SKIPPED : field_bits(page + L_FIELDS, slot % BLOCK_SIZE);
    }
  }

  DEVICE_MEMBER void unpack_rope(Table, const RopeLevels&, u32 to, TokenScales& scales, int first, int lane) const {
    const int second = lane % 4, t = lane & 3, odd = lane >> 2 & 1;
    if (second < 2) {
      const u32 field = second ? fields[1] : fields[0];
      scales.put(first + lane / 4 + 8 * second, field == SKIPPED ? 0 : field, 0);
      if (field == SKIPPED) scales.log[first + lane / 4 + 8 * second] = MINUS_INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool skipped = fields[i] == SKIPPED;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Words4 x = rope[i][half];
        if (skipped) x = {0, 0, 0, 0};  // a number, whatever the bytes are
        store_unit(to, t + 4 * (half ? 1 - odd : odd), i, x, lane);
      }
    }
  }
  // Slices FIRST to LAST - 1: a quarter.
  template <int FIRST, int LAST> DEVICE_MEMBER void unpack_latents(Table table, u32 to, int lane) const {
    constexpr int Q = FIRST / (LATENT_SLICES / 4);
    static_assert(LAST - FIRST == LATENT_SLICES / 4, "a quarter");
    const int t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int k = 0; k < WORDS; k++) {
        // Of four words, lanes 2 and 3 take the others of a pair first: they are 128 bytes behind lanes 0 and 1.
        const bool swapped = WORDS == 4 && t >= 2;
        const u32 word = swapped ? latent[i][Q][WORDS == 4 ? k ^ 2 : k] : latent[i][Q][k];
        u32 a[4];
        level_matrices(word, 0, table, a);
        store_unit(to, Q * (LD / 32) + t * WORDS + (swapped ? k ^ 2 : k), i, {a[0], a[2], a[1], a[3]}, lane);
      }
  }
  // Eight dimensions, from 8 unit on, of the lane's token i.
  DEVICE_MEMBER static void store_unit(u32 to, int unit, int i, const Words4& x, int lane) {
    const int row = lane / 4 + 8 * i;
    st_shared_words4(to + unit / 8 * 8192 + row * 128 + ((unit % 8 ^ (row & 7)) << 4), x);
  }
};
