// What the warps of a team of narrow.cu share: the ring of KV blocks, rows, and scores of rope parts.
#pragma once
#include "latent/narrow_codes.cuh"

typedef float Fragment[4];

struct __attribute__((aligned(16))) Row {
  float start, unit, rope_unit;
  i32 visible_end;
};

DEVICE float marked_scale(u32 field) { return field == INVALID_FIELD ? NOT_A_NUMBER : scale_of(field); }

struct TeamMember {
  static constexpr int SCORED = 2 + TEAMS;  // the first of the teams' named barriers
  u8* const shared;  // the block's memory
  u8* const mine;    // the team's memory
  const int team, lane, g, t;
  int slot;
  u32 phase, odd;  // odd: whether the team has finished an odd number of KV blocks

  DEVICE_MEMBER TeamMember(u8* shared_, int team_, int lane_)
      : shared(shared_), mine(shared_ + TEAMS_AT + team_ * TEAM_BYTES), team(team_), lane(lane_), g(lane_ >> 2),
        t(lane_ & 3), slot(0), phase(0), odd(0) {}

  DEVICE_MEMBER const Row& row_of(int n) const { return ((const Row*)(shared + ROWS_AT))[g + 8 * n]; }
  DEVICE_MEMBER u64* full() const { return (u64*)(mine + BARRIERS_AT) + slot; }
  DEVICE_MEMBER u64* empty() const { return full() + STAGES; }
  DEVICE_MEMBER const u8* wait_for_stage() const {
    mbarrier_wait(full(), phase);
    return mine + RING_AT + slot * STAGE_BYTES;
  }
  DEVICE_MEMBER void advance() {
    odd ^= 1, slot++;
    if (slot == STAGES) slot = 0, phase ^= 1;
  }
  // Waits until all scores are written, and the stage has been read.
  DEVICE_MEMBER void finish_scores() const { bar_sync(SCORED + team, 32 * (WARPS + 1)); }
  // Scores of rope parts, for 8 tokens and rows 8 n to 8 n + 7, in two buffers that alternate between KV blocks.
  DEVICE_MEMBER Words2* rope_scores(int octet, int n) const {
    return (Words2*)(mine + ROPE_SCORES_AT) + ((odd * OCTETS + octet) * 2 + n) * 32 + lane;
  }
};
