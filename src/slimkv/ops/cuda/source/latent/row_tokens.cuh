// 16 single tokens per warp of wide.cu, anywhere in pages of token rows (sparse attention): 4-bit codes and 16-bit rope
// parts in registers, then as rows of operands (tokens x 64 dimensions) in shared memory. A token is a row of
// ROW_STRIDE bytes; the block table has its slot, or a negative number for no token.
//
// As in Tokens, the two halves of the dimensions are loaded separately.
#pragma once
#include "latent/args.cuh"
#include "latent/wide_tokens.cuh"

// Lane 4 g + t has tokens g and g + 8, and the t-th quarter of every quarter of their dimensions.
struct RowTokens {
  static constexpr int WORDS = LD / 128;  // per quarter: 8 codes each, which become 16 bytes of an operand
  static constexpr u32 SKIPPED = 0x10000;  // the field of a skipped token
  u32 latent[2][4][WORDS];
  Words4 rope[2][2];
  u32 fields[2];
  const u8* rows[2];  // addresses of the tokens to load
  i32 slots[2], ahead[2];  // slots of these tokens and of the next ones

  DEVICE_MEMBER void look_ahead(const i32* table, int token, int length, int lane) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const int at = token + lane / 4 + 8 * i;
      ahead[i] = at < length ? ldg_i32(table + at) : -1;
    }
  }
  // A skipped token loads the codes of slot 0, and its score is minus infinity.
  DEVICE_MEMBER void aim(const LatentArgs& args) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
      slots[i] = ahead[i];
      const u32 slot = slots[i] < 0 ? 0 : slots[i];
      rows[i] = args.pages + (i64)(slot / BLOCK_SIZE) * args.page_stride + slot % BLOCK_SIZE * ROW_STRIDE;
    }
  }
  DEVICE_MEMBER void load_rope(int lane) {
    // Even tokens load the first half of the rope part first, odd ones the second half, to avoid bank conflicts.
    const int at = 16 * ((lane & 3) + (lane & 4));
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const int position = slots[i] % BLOCK_SIZE;
      const u8* const own = rows[i] + R_CODES;
      rope[i][0] = *(const Words4*)(own + at), rope[i][1] = *(const Words4*)(own + (at ^ 64));
      fields[i] = slots[i] < 0 ? SKIPPED : field_bits(rows[i] - position * ROW_STRIDE + L_FIELDS, position);
    }
  }
  template <int Q> DEVICE_MEMBER void load_latents(int lane) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
      const u8* const own = rows[i] + Q * (LD / 8) + (lane & 3) * (LD / 32);
      if constexpr (WORDS == 4) {
        const Words4 x = *(const Words4*)own;
        latent[i][Q][0] = x.x, latent[i][Q][1] = x.y, latent[i][Q][2] = x.z, latent[i][Q][3] = x.w;
      } else {
        UNROLL_FOR (int k = 0; k < WORDS; k++) latent[i][Q][k] = ((const u32*)own)[k];
      }
    }
  }
  DEVICE_MEMBER void load_first(int lane) {
    load_rope(lane);
    load_latents<0>(lane), load_latents<1>(lane);
  }
  DEVICE_MEMBER void load_second(int lane) { load_latents<2>(lane), load_latents<3>(lane); }

  // In shared memory, 16-byte unit u of a row is at u ^ g. The lane's second row is 1024 bytes after its first.
  DEVICE_MEMBER void unpack_rope(Table, const RopeLevels&, u32 to, TokenScales& scales, int first, int lane) {
    const int second = lane % 4;
    if (second < 2) {
      const u32 field = second ? fields[1] : fields[0];
      const int token = first + lane / 4 + 8 * second;
      scales.put(token, TokenScale(field == SKIPPED ? 0 : field, 0));
      if (field == SKIPPED) scales.log[token] = MINUS_INFINITY;
    }
    const u32 own = to + lane / 4 * 128 + (((lane & 3) + (lane & 4) ^ (lane >> 2)) << 4);
    UNROLL_FOR (int i = 0; i < 2; i++) {
      if (fields[i] == SKIPPED) rope[i][0] = rope[i][1] = {0, 0, 0, 0};  // not NaN, whatever the bytes are
      if (i == 0) st_shared_words4<0>(own, rope[i][0]), st_shared_words4<0>(own ^ 64, rope[i][1]);
      else st_shared_words4<1024>(own, rope[i][0]), st_shared_words4<1024>(own ^ 64, rope[i][1]);
    }
  }
  // Unpacks quarter Q of the dimensions, of token g (piece 0) and of token g + 8 (piece 1).
  template <int Q, int FROM = 0, int TO = 2> DEVICE_MEMBER void unpack_latents(Table table, u32 to, int lane) const {
    if constexpr (FROM == 0) unpack_token<Q, 0>(table, to, lane);
    if constexpr (TO == 2) unpack_token<Q, 1>(table, to, lane);
  }
  template <int Q, int I> DEVICE_MEMBER void unpack_token(Table table, u32 to, int lane) const {
    constexpr int UNIT = Q * (LD / 32), OFFSET = UNIT / 8 * 8192 + 1024 * I;
    // With four words, lanes 2 and 3, which store 128 bytes after lanes 0 and 1, swap pairs to avoid bank conflicts.
    const int t = lane & 3, g = lane >> 2;
    const bool turned = WORDS == 4 && t >= 2;
    const u32 first = to + t * WORDS / 8 * 8192 + g * 128 + ((t * WORDS % 8 ^ g ^ (turned ? 2 : 0)) << 4);
    const u32 own = first ^ (UNIT % 8 << 4);
    UNROLL_FOR (int k = 0; k < WORDS; k++) {
      u32 a[4];
      level_matrices(turned ? latent[I][Q][WORDS == 4 ? k ^ 2 : k] : latent[I][Q][k], 0, table, a);
      st_shared_words4<OFFSET>(own ^ (k << 4), {a[0], a[2], a[1], a[3]});
    }
  }
};
