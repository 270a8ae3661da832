// Regions of shared memory of columns.cu, and what its warpgroups know of query rows, which are columns of products.
#pragma once
#include "common/numbers.cuh"
#include "latent/schedule.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64;  // of 64 dimensions
constexpr int CHUNK = KV_BLOCK * 128, STAGE = CHUNKS * CHUNK;  // bytes
constexpr int QUERY_CHUNK = ROWS * 128, PROBABILITIES = ROWS * 128;

constexpr int OWN_CHUNKS = (CHUNKS + 1) / 2;  // of a warpgroup that multiplies values
constexpr int ALL = 1, SCORERS = 2, TURN = 3, SCORER = 5, SUMS = 7;  // named barriers; TURN and SCORER have two each
constexpr float LOWEST = -1e30f;  // the running maximum of a row that has seen nothing
static_assert(STAGES == 2 && ROWS % 8 == 0 && ROWS <= 32 && KV_BLOCK == 64 && CHUNKS >= ROPE_CHUNKS, "operands");

typedef float Scores[ROWS / 2];  // of a lane: tokens g and g + 8, rows 8 j + 2 t and the next one
typedef float Output[OWN_CHUNKS][ROWS / 2];

struct __attribute__((aligned(16))) Columns {
  float pairs[ROWS / 2][4];  // units of two rows' scores, and their running maxima
  float rope[ROWS];  // the unit of rope parts in units of latents
  i32 visible_end[ROWS];
  float seen[2][ROWS];  // maxima that the sums of a warpgroup's lanes are relative to
  float by[STAGES][ROWS];  // what the output is to be multiplied by, where `raised`
  float of_warp[8][ROWS];
  i32 raised[STAGES];
  i32 generation;  // of the maxima
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

// Shared memory and the place of a warp in it.
struct Place {
  u8* shared;
  int group, warp, lane;  // of the two that score or multiply values, and among its four warps

  DEVICE_MEMBER Columns& columns() const { return *(Columns*)(shared + COLUMNS_AT); }
  DEVICE_MEMBER u64* full(int stage) const { return (u64*)(shared + BARRIERS_AT) + stage; }
  // Of chunks 2 c and 2 c + 1.
  DEVICE_MEMBER u64* empty(int stage, int c) const {
    return (u64*)(shared + BARRIERS_AT) + STAGES + stage * OWN_CHUNKS + c;
  }
  DEVICE_MEMBER u32 stage(int i) const { return shared_address(shared + RING_AT) + i * STAGE; }
  DEVICE_MEMBER u32 probabilities(int i) const { return shared_address(shared + PROBABILITIES_AT) + i * PROBABILITIES; }
  DEVICE_MEMBER AnnouncedRanges& ranges() const { return *(AnnouncedRanges*)(shared + RANGES_AT); }
};
