// Shared memory of columns.cu, and the state of its query rows, which are columns of wgmmas.
#pragma once
#include "common/numbers.cuh"
#include "latent/schedule.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64;  // chunks of 64 dimensions
constexpr int CHUNK = KV_BLOCK * 128, STAGE = CHUNKS * CHUNK;  // bytes
constexpr int QUERY_CHUNK = ROWS * 128, PROBABILITIES = ROWS * 128;

constexpr int OWN_CHUNKS = (CHUNKS + 1) / 2;  // chunks per value warpgroup
constexpr int ALL = 1, SCORERS = 2, TURN = 3, SCORER = 5, SUMS = 7;  // named barriers; TURN and SCORER have two each
constexpr float LOWEST = -1e30f;  // the running maximum of a row without visible tokens so far
static_assert(STAGES == 2 && ROWS % 8 == 0 && ROWS <= 32 && KV_BLOCK == 64 && CHUNKS >= ROPE_CHUNKS, "operands");

typedef float Scores[ROWS / 2];  // of a lane: tokens g and g + 8, rows 8 j + 2 t and 8 j + 2 t + 1
typedef float Output[OWN_CHUNKS][ROWS / 2];

struct __attribute__((aligned(16))) Columns {
  float pairs[ROWS / 2][4];  // for two rows: units of their scores, and running maxima
  float rope[ROWS];  // the unit of rope parts relative to that of latents
  i32 visible_end[ROWS];
  float seen[2][ROWS];  // the maxima to which the sums in a warpgroup's lanes are relative
  float by[STAGES][ROWS];  // rescaling factors of the output, valid if `raised`
  float of_warp[8][ROWS];
  i32 raised[STAGES];
  i32 generation;  // incremented when maxima change
  i32 unused;

  DEVICE_MEMBER float& unit(int n) { return pairs[n / 2][n % 2]; }
  DEVICE_MEMBER float& row_max(int n) { return pairs[n / 2][2 + n % 2]; }
};
// Regions of shared memory, one after the other.
constexpr int QUERIES_AT = 0, RING_AT = (CHUNKS + ROPE_CHUNKS) * QUERY_CHUNK,
              PROBABILITIES_AT = RING_AT + STAGES * STAGE, COLUMNS_AT = PROBABILITIES_AT + STAGES * PROBABILITIES,
              BARRIERS_AT = COLUMNS_AT + sizeof(Columns), RANGES_AT = BARRIERS_AT + 40 * STAGES,
              LEVELS_AT = RANGES_AT + 48, ROPE_LEVELS_AT = LEVELS_AT + 128 * L_LEVELS;
static_assert(ROPE_LEVELS_AT + 2 * R_LEVELS == SHARED_BYTES && 1 + OWN_CHUNKS <= 5 && sizeof(AnnouncedRanges) <= 48,
    "shared memory");

// Shared memory and the position of a lane.
struct Place {
  u8* shared;
  int group, warp, lane;  // group: 0 or 1 of the two warpgroups of a role; warp: in the warpgroup

  DEVICE_MEMBER Columns& columns() const { return *(Columns*)(shared + COLUMNS_AT); }
  DEVICE_MEMBER u64* full(int stage) const { return (u64*)(shared + BARRIERS_AT) + stage; }
  // For chunks 2 c and 2 c + 1.
  DEVICE_MEMBER u64* empty(int stage, int c) const {
    return (u64*)(shared + BARRIERS_AT) + STAGES + stage * OWN_CHUNKS + c;
  }
  DEVICE_MEMBER u32 stage(int i) const { return shared_address(shared + RING_AT) + i * STAGE; }
  DEVICE_MEMBER u32 probabilities(int i) const { return shared_address(shared + PROBABILITIES_AT) + i * PROBABILITIES; }
  DEVICE_MEMBER AnnouncedRanges& ranges() const { return *(AnnouncedRanges*)(shared + RANGES_AT); }
};
