// A warpgroup that unpacks tiles of 64 tokens into stages of shared memory, for others that multiply.
#pragma once
#include "latent/schedule.cuh"
#include "latent/tokens.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64, CHUNK = 64 * 128;  // bytes of 64 dimensions of 64 tokens
constexpr int STAGE = (CHUNKS + ROPE_CHUNKS) * CHUNK;

template <int STAGES> struct Producer {
  const LatentArgs& args;
  u8* const ring;
  TokenScales* const scales;  // [stage]
  u64* const full;   // [stage, quarter of the dimensions]; rope parts and scales belong to the first one
  u64* const empty;  // [stage, half of them]
  const int warp, lane;

  DEVICE_MEMBER Producer(const LatentArgs& args_, u8* ring_, TokenScales* scales_, u64* full_, u64* empty_, int warp_, int lane_)
      : args(args_), ring(ring_), scales(scales_), full(full_), empty(empty_), warp(warp_), lane(lane_) {}

  // Those that multiply put the fence before their products: here it would wait for loads.
  DEVICE_MEMBER void report(u64* to) const {
    sync_warp();
    if (lane == 0) mbarrier_arrive(to);
  }

  template <class Rope> DEVICE_MEMBER void run(const LevelTable& levels, const Rope& rope_levels) const {
    int number = 0;  // of the block's tiles
    Walk walk(args, block_index(), lane);
    Range range;
    while (walk.next(args, range)) {
      const Item item(args, range.sequence, range.tile);
      const int last = min_i32(range.last, item.steps(args));
      const i32* table = args.block_table + (i64)item.sequence * args.table_stride;
      auto token_of = [&](int tile) { return tile * 64 + 16 * warp; };
      auto page_of = [&](int tile) { return token_of(tile) < item.length ? ldg_i32(table + token_of(tile) / BLOCK_SIZE) : 0; };
      Tokens tokens;
      auto load = [&](i32 page, int tile) {
        tokens.load(args.pages + page * args.page_stride, token_of(tile) % BLOCK_SIZE, item.length - token_of(tile), lane);
      };
      const int first = range.first;
      i32 page = 0, ahead = 0, beyond = 0;  // of the next tile and of those after it: none is waited for
      if (first < last) {
        load(page_of(first), first);
        page = page_of(first + 1), ahead = page_of(first + 2), beyond = page_of(first + 3);
      }
      for (int tile = first; tile < last; tile++, number++) {
        const int stage = number % STAGES;
        const u32 to = shared_address(ring) + stage * STAGE + warp * 2048, turn = (u32)(number / STAGES & 1);
        mbarrier_wait(empty + 2 * stage, turn ^ 1);
        tokens.unpack_rope(args.table, rope_levels, to + CHUNKS * CHUNK, scales[stage], 16 * warp, lane);
        tokens.template unpack_latents<0, S / 4>(args.table, levels, to, lane);
        report(full + 4 * stage);
        tokens.template unpack_latents<S / 4, S / 2>(args.table, levels, to, lane);
        report(full + 4 * stage + 1);
        mbarrier_wait(empty + 2 * stage + 1, turn ^ 1);
        tokens.template unpack_latents<S / 2, 3 * S / 4>(args.table, levels, to, lane);
        report(full + 4 * stage + 2);
        tokens.template unpack_latents<3 * S / 4, S>(args.table, levels, to, lane);
        report(full + 4 * stage + 3);
        if (tile + 1 < last) {
          load(page, tile + 1);
          page = ahead, ahead = beyond, beyond = page_of(tile + 4);
        }
      }
    }
  }
};
