// Attention of many rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope parts, values from the same
// latents.
//
// A block has up to 64 rows of a sequence and some of its tokens, a tile of 64 at a time. One warpgroup, the scorer, unpacks a tile
// to levels, which halves have exactly: they are operands of its scores (tokens x rows) in registers and go to shared memory for
// values. It makes weights of the scores. Two more warpgroups multiply those with the tile, half of the dimensions each, while the
// scorer is at the next one. Scores and weights are multiplied by the tokens' scales.
#include "common/hopper.cuh"
#include "common/numbers.cuh"
#ifndef ITEM
#define ITEM 4
#endif

constexpr int ROWS = 64, STEP = 64, THREADS = 384, ITEM_COST = ITEM, PARTS = 1, STAGES = 2;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/scorer.cuh"

constexpr int HALF = LD / 2;  // dimensions of a warpgroup
static_assert(L_LEVELS == 0 && (HALF == 64 || HALF == 128 || HALF == 256), "what fits");
#ifndef SCORER_REGISTERS
#define SCORER_REGISTERS 184
#endif
constexpr int VALUE_REGISTERS = (504 - SCORER_REGISTERS) / 2;

typedef float Output[HALF / 2];

// 16 rows of the output, from row `first` on, to memory: as they are in registers, or through shared memory, so that lines are
// written as a whole.
DEVICE void leave_output_directly(float* to, const Output& o, int first, int count, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int n = first + (lane >> 2) + 8 * r;
    if (n >= count) continue;
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) to[(i64)n * LD + place_of(8 * j + 2 * (lane & 3) + i)] = o[4 * j + 2 * r + i] * LEVEL_UNIT;
  }
}
DEVICE void leave_output(float* to, const Output& o, int first, int count, u8* scratch, int lane) {
  constexpr int PASS = 32, PITCH = 4 * PASS + 32;  // dimensions at a time, and bytes of a row of them: no two rows in the same banks
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int pass = 0; pass < HALF / PASS; pass++) {
    u8* const rows = scratch + pass % 2 * 16 * PITCH;
#pragma unroll
    for (int j = 0; j < PASS / 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float low = o[PASS / 2 * pass + 4 * j + 2 * r] * LEVEL_UNIT, high = o[PASS / 2 * pass + 4 * j + 2 * r + 1] * LEVEL_UNIT;
        float* const row = (float*)(rows + (g + 8 * r) * PITCH);
        if (IN_BYTES) *(Words2*)(row + 8 * j + 2 * t) = {as_bits(low), as_bits(high)};
        else row[place_of(8 * j + 2 * t)] = low, row[place_of(8 * j + 2 * t + 1)] = high;
      }
    sync_warp();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int n = 4 * k + lane / 8;
      const Words4 own = *(const Words4*)(rows + n * PITCH + lane % 8 * 16);
      if (first + n < count) *(Words4*)(to + (i64)(first + n) * LD + PASS * pass + lane % 8 * 4) = own;
    }
  }
}

// Values of a block's tiles: half of the dimensions, by one warpgroup.
DEVICE void add_values(const LatentArgs& args, u8* shared, int group, int lane) {
  const int thread = thread_index() % 128, warp = shfl(thread / 32, 0), g = lane >> 2, t = lane & 3;
  Board& board = *(Board*)(shared + BOARD_AT);
  int number = 0;  // of the block's tiles
  Route* const route = board.routes;
  if (thread_index() < 32) {
    const Walk walk(args, block_index(), lane);
    if (lane == 0) route->walk = walk;
  }
  for (bool first = true;; first = false) {
    bar_sync(OF_VALUES, 256);
    if (thread_index() == 0) route->go_on(args);
    bar_sync(OF_VALUES, 256);
    const Range range = route->common_range();
    if (range.sequence < 0) return;
    const Item item(args, range.sequence, range.tile);
    const int count = shfl(min_i32(range.last, item.steps(args)) - range.first, 0);
    if (first) {  // the scorer is busy with its first tile; later it stages them itself, while these write what they have
      stage_queries<8>(args, item, 4 * group + warp, lane, shared, board);
      fence_proxy_async();
      bar_arrive(QUERIES, THREADS);
    }
    Output o;
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) o[i] = 0.0f;
#if TRACE
    u32 ticks[3] = {}, then = clock_now();
#endif
    for (int tile = 0; tile < count; tile++, number++) {
      const int stage = number % STAGES;
      TICK(2)
      mbarrier_wait(board.full + stage, (u32)(number / STAGES & 1));
      TICK(0)
      if (board.rescaled[stage]) {
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) by[r] = board.factors[stage][16 * warp + g + 8 * r];
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) o[i] *= by[i / 2 % 2];
      }
      const u64 weights = smem_descriptor(shared_address(shared + WEIGHTS_AT) + stage * WEIGHTS, 16);
      const u64 values = smem_descriptor(shared_address(shared + RING_AT) + stage * STAGE + group * (CHUNKS / 2) * CHUNK, CHUNK);
      wgmma_fence_operand(o);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)
        Wgmma<HALF>::shared_a_across(o, descriptor_behind(weights, k * 32), descriptor_behind(values, k * 2048));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(o);
      TICK(1)
      if (lane == 0 && tile + 1 < count) mbarrier_arrive(board.empty[stage] + group);
    }
#if TRACE
    if (thread == 0 && first) {
      u32* const to = (u32*)(args.states + 2 * (args.sequences * args.row_tiles + args.blocks) * ROWS) + 64 * block_index();
      for (int i = 0; i < 3; i++) to[40 + 4 * group + i] = ticks[i];
      to[43 + 4 * group] = number;
    }
#endif
    const i64 part = (i64)range.part(args, block_index()) * ROWS;
    if (count > 0) {
      const int stage = (number - 1) % STAGES;
      u8* const scratch = shared + RING_AT + stage * STAGE + group * (CHUNKS / 2) * CHUNK + warp * (CHUNKS / 8 * CHUNK);
      if (HALF == 256) leave_output(args.parts + part * LD + group * HALF, o, 16 * warp, item.count, scratch, lane);
      else leave_output_directly(args.parts + part * LD + group * HALF, o, 16 * warp, item.count, lane);
      sync_warp();
      if (lane == 0) mbarrier_arrive(board.empty[stage] + group);
    } else {
      leave_output_directly(args.parts + part * LD + group * HALF, o, 16 * warp, item.count, lane);
    }
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  if (thread_index() == 256) { MARK(0) }
  const int lane = thread_index() & 31, warp = shfl(thread_index() / 32, 0);
  Board& board = *(Board*)(shared + BOARD_AT);
  fill_packed_levels<R_LEVELS, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) mbarrier_init(board.full + i, 4), mbarrier_init(board.empty[i], 4), mbarrier_init(board.empty[i] + 1, 4);
    fence_mbarrier_init();
  }
  pdl_wait();
  sync_threads();
  if (warp >= 8) {
    if (SCORER_REGISTERS > 168) setmaxnreg_inc<SCORER_REGISTERS>();
    Scorer(args, shared, warp - 8, lane).run();
  } else {
    if (SCORER_REGISTERS > 168) setmaxnreg_dec<VALUE_REGISTERS>();
    add_values(args, shared, warp / 4, lane);
  }
}
HOST_TESTABLE(attend, LatentArgs)
