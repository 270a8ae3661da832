// Products of queries and keys for the step of a pair.
#pragma once
#include "decode/scores.cuh"
#include "decode/verify_pair.cuh"

// The offset of the fields of a warp's own tile x from those of its first tile.
DEVICE int own_fields_offset(int x) { return fields_of(TILES_APART * x) - FIELDS_AT; }

// Reorders finished wgmma accumulators into scores.
DEVICE void take_scores(float (&c)[SCORED_TILES][4 * NG], StepScores& s) {
  UNROLL_FOR (int x = 0; x < SCORED_TILES; x++) {
    wgmma_fence_operand(c[x]);
    UNROLL_FOR (int i = 0; i < 4 * NG; i++) s[2 * (i / 4) + i % 2][x][i / 2 % 2] = c[x][i];
  }
}

// The key operands of a step: the tiles of four warps are the rows of one wgmma. The centroids of the next slices are
// looked up while the current products run, EARLY rounds of products ahead.
struct KeyOperands {
  static constexpr int AT_ONCE = KS > 1 ? 2 : 1, ROUNDS = (KS + AT_ONCE - 1) / AT_ONCE, ALL = SCORED_TILES * ROUNDS,
                       EARLY = TILE_BY_TILE && ALL == 4 && K_IN_PAIRS && K_BITS < 5 ? 3 : 1,
                       BUFFERS = EARLY == 1 ? 3 : ALL;
  KeyCodes codes[SCORED_TILES];
  u32 a[BUFFERS][AT_ONCE][4];

  DEVICE_MEMBER void look_up(int round, const LevelTables& tables) {
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++)
      if (round % ROUNDS * AT_ONCE + i < KS) {
        key_halves(codes[round / ROUNDS], round % ROUNDS * AT_ONCE + i, tables, a[round % BUFFERS][i]);
        if (K_KIND == FP8) wgmma_fence_operand(a[round % BUFFERS][i]);  // see attend_values
      }
  }
  DEVICE_MEMBER void load(const u8* slot, const LevelTables& tables, int lane) {
    UNROLL_FOR (int x = 0; x < SCORED_TILES; x++) codes[x].load(slot + keys_of(TILES_APART * x), lane);
    UNROLL_FOR (int round = 0; round < EARLY; round++) look_up(round, tables);
  }
  DEVICE_MEMBER void multiply(const u8* shared, const LevelTables& tables, StepScores& s) {
    const u64 queries = smem_descriptor(shared_address(shared + QUERY_AT), 16);
    float c[SCORED_TILES][4 * NG];
    UNROLL_FOR (int round = 0; round < ALL; round++) {
      wgmma_fence();
      UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
        const int x = round / ROUNDS, slice = round % ROUNDS * AT_ONCE + i;
        const u32(&operand)[4] = a[round % BUFFERS][i];
        const u64 query = advance_descriptor(queries, slice / 4 * OPERAND_BYTES + slice % 4 * 32);
        if (slice == 0)
          WarpgroupProduct::register_a<false>(c[x], operand[0], operand[1], operand[2], operand[3], query);
        else if (slice < KS)
          WarpgroupProduct::register_a<true>(c[x], operand[0], operand[1], operand[2], operand[3], query);
      }
      wgmma_commit();
      if (round + EARLY < ALL) look_up(round + EARLY, tables);  // the round before last has ended
      if (round) wgmma_wait<1>();
    }
    wgmma_wait<0>();
    take_scores(c, s);
  }
};
