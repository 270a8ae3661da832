// What the kernel of latents is compiled for, its arguments, and where things are in shared memory.
//
// Compile-time: what latent/format.cuh names, ROWS and WARPGROUPS (rows and warpgroups of a block), RESIDENT (blocks of a
// multiprocessor), SHARED.
#pragma once
#include "common/hopper.cuh"
#include "latent/args.cuh"
#include "latent/format.cuh"

constexpr int THREADS = 128 * WARPGROUPS, WARPS = 4 * WARPGROUPS, TILE = 64 * WARPGROUPS, CHUNKS = LD / 64;
constexpr int OWN_CHUNKS = CHUNKS / WARPGROUPS, ROPE_CHUNKS = (RD + 63) / 64;
constexpr int L_COPIES = 32, R_COPIES = ROWS < 32 ? 8 : 4;  // of a level, so that lanes seldom wait for one another
constexpr int COLUMNS = ROWS / 4;  // of a lane: 8 j + 2 t and 8 j + 2 t + 1
static_assert((WARPGROUPS == 1 && (ROWS == 8 || ROWS == 16 || ROWS == 32)) || (WARPGROUPS == 2 && ROWS == 64 && LD % 128 == 0), "rows");

// What the product with latents starts from beside that of rope parts, the unit of this in units of that, what makes scores of
// the sum, and which tokens a row sees.
struct __attribute__((aligned(16))) Column { float start, rope, unit; i32 visible_end; };

constexpr int GROUP_VALUES = CHUNKS * 64 * 128, GROUP_WEIGHTS = ROWS * 128;  // bytes of the 64 tokens of a warpgroup
constexpr int VALUES_AT = 0, QUERIES_AT = VALUES_AT + WARPGROUPS * GROUP_VALUES;
constexpr int ROPE_AT = QUERIES_AT + CHUNKS * ROWS * 128, WEIGHTS_AT = ROPE_AT + ROPE_CHUNKS * ROWS * 128;
constexpr int COLUMNS_AT = WEIGHTS_AT + WARPGROUPS * GROUP_WEIGHTS, MOST_AT = COLUMNS_AT + 16 * ROWS;
constexpr int L_LEVELS_AT = MOST_AT + 4 * WARPS * ROWS;
constexpr int R_LEVELS_AT = L_LEVELS_AT + 4 * L_COPIES * L_LEVELS, ALL = R_LEVELS_AT + 4 * R_COPIES * R_LEVELS;
static_assert(ALL + 1024 == SHARED, "the launcher counts shared memory as this file does");

// Rows of a block: (query, head) pairs first .. of a sequence.
struct Rows {
  int sequence, first, start, queries, length, count;

  DEVICE_MEMBER Rows(const LatentArgs& args, int item) {
    sequence = item / args.row_tiles;
    first = item % args.row_tiles * ROWS;
    start = ldg_i32(args.cu_seqlens_q + sequence);
    queries = ldg_i32(args.cu_seqlens_q + sequence + 1) - start;
    length = ldg_i32(args.seq_lens + sequence);
    count = min_i32(ROWS, queries * args.heads - first);
  }
  // One past the last token that row n sees.
  DEVICE_MEMBER int visible_end(const LatentArgs& args, int n) const {
    return max_i32(min_i32(length, length - queries + (first + n) / args.heads + 1), 0);
  }
};
