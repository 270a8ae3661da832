// A warp of narrow.cu that computes the scores of rope parts for a team.
#pragma once
#include "latent/narrow_team.cuh"

struct RopeScorer : TeamMember {
  static constexpr bool HELD = ROPE_SLICES <= 4;  // queries stay in registers; larger ones have too few
  const LatentArgs& args;
  const LevelTable levels;
  Words4 queries[HELD ? ROPE_SLICES : 1];
  float unit[2];  // for rows g and g + 8

  DEVICE_MEMBER RopeScorer(const LatentArgs& args_, u8* shared_, int team_, int lane_)
      : TeamMember(shared_, team_, lane_), args(args_), levels{shared_address(shared_ + ROPE_LEVELS_AT) + 4 * lane_} {}

  DEVICE_MEMBER Words4 query_of(int i) const {
    return *(const Words4*)(shared + ROPE_QUERIES_AT + 512 * i + 16 * lane);
  }
  // Starts a work tile whose queries are in shared memory.
  DEVICE_MEMBER void take_rows() {
    if constexpr (HELD)
      UNROLL_FOR (int i = 0; i < ROPE_SLICES; i++) queries[i] = query_of(i);
    UNROLL_FOR (int n = 0; n < 2; n++) unit[n] = BF16_ROPE ? R_UNIT * args.scale : row_of(n).rope_unit;
  }
  DEVICE_MEMBER void attend() {
    const u8* const stage = wait_for_stage();
#pragma unroll R_LEVELS ? TOKEN_TILES : 1  // by measurement
    for (int i = 0; i < TOKEN_TILES; i++) score(stage, i);
    finish_scores();
    advance();
  }
  // A slice of 8 tokens, dimensions x tokens, as an operand: b[0] and b[1].
  DEVICE_MEMBER void operand(const u32* words, int half, u32 (&b)[4]) const {
    if constexpr (R_KIND == RAW) {  // a word has dimensions g and g + 8 of a token
      const u32 first = words[2 * half], second = words[2 * half + 1];
      b[0] = movmatrix_trans(prmt(first, second, 0x5410)), b[1] = movmatrix_trans(prmt(first, second, 0x7632));
    } else {  // the lane gets bytes of dimensions 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of a token
      const u32 word = movmatrix_trans(words[half]);
      code_halves<R_KIND, 8, true>(word, word, args.table, levels, b);
    }
  }
  // Scores of 16 tokens.
  DEVICE_MEMBER void score(const u8* stage, int token_tile) {
    Fragment r[2] = {};
    RopeCodes rope;
    rope.load(stage + ROPE_CODES_AT + token_tile * R_TILE, lane);
    UNROLL_FOR (int i = 0; i < ROPE_SLICES; i++) {
      const Words4 q = HELD ? queries[i % (HELD ? ROPE_SLICES : 1)] : query_of(i);
      UNROLL_FOR (int half = 0; half < 2; half++) {
        u32 b[4];
        operand(rope.of_slice(i), half, b);
        if (BF16_ROPE) mma_bf16(r[half], q.x, q.y, q.z, q.w, b[0], b[1]);
        else mma_f16(r[half], q.x, q.y, q.z, q.w, b[0], b[1]);
      }
    }
    UNROLL_FOR (int half = 0; half < 2; half++) {
      const int octet = 2 * token_tile + half;
      float scale[2] = {1.0f, 1.0f};
      if (R_KIND != RAW) {
        const u32 fields = *(const u32*)(stage + ROPE_FIELDS_AT + 2 * (8 * octet + 2 * t));
        UNROLL_FOR (int b = 0; b < 2; b++) scale[b] = marked_scale(fields >> (16 * b) & 0xFFFF);
      }
      UNROLL_FOR (int n = 0; n < 2; n++)
        *rope_scores(octet, n) = {as_bits(r[half][2 * n] * (scale[0] * unit[n])),
            as_bits(r[half][2 * n + 1] * (scale[1] * unit[n]))};
    }
  }
};
