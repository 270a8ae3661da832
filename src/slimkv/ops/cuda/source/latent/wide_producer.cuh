// The warpgroup of wide.cu that unpacks KV blocks into stages of shared memory, for those that attend.
#pragma once
#include "latent/row_tokens.cuh"
#include "latent/schedule.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64;  // of 64 dimensions
constexpr int CHUNK = KV_BLOCK * 128, STAGE = (CHUNKS + ROPE_CHUNKS) * CHUNK;  // bytes
constexpr int QUARTER = LATENT_SLICES / 4;  // slices that are handed over together

struct Producer {
  const LatentArgs& args;
  u8* const ring;
  TokenScales* const scales;  // [stage]
  u64* const full;  // [stage, quarter of the dimensions]; rope parts and scales belong to the first quarter
  u64* const empty;  // [stage, half of the dimensions]
  const RopeLevels rope_levels;
  const int warp, lane;

  // The proxy fence is on the side of those that multiply: here it would wait for loads.
  DEVICE_MEMBER void report(u64* to) const {
    sync_warp();
    if (lane == 0) mbarrier_arrive(to);
  }

  // Stage `number` of all that this block fills.
  template <class T> DEVICE_MEMBER void unpack(T& tokens, int number) const {
    const int stage = number % STAGES;
    const u32 to = shared_address(ring) + stage * STAGE + warp * 2048, turn = (u32)(number / STAGES & 1);
    u64* const quarters = full + 4 * stage;
    mbarrier_wait(empty + 2 * stage, turn ^ 1);
    tokens.unpack_rope(args.table, rope_levels, to + CHUNKS * CHUNK, scales[stage], 16 * warp, lane);
    tokens.template unpack_latents<0, QUARTER>(args.table, to, lane);
    report(quarters);
    tokens.template unpack_latents<QUARTER, 2 * QUARTER>(args.table, to, lane);
    report(quarters + 1);
    mbarrier_wait(empty + 2 * stage + 1, turn ^ 1);
    tokens.template unpack_latents<2 * QUARTER, 3 * QUARTER>(args.table, to, lane);
    report(quarters + 2);
    tokens.template unpack_latents<3 * QUARTER, 4 * QUARTER>(args.table, to, lane);
    report(quarters + 3);
  }

  // A range of single tokens: while one KV block is unpacked, the next is loaded and the slots after it are looked up.
  DEVICE_MEMBER void run_rows(const i32* table, int length, int first, int last, int& number) const {
    RowTokens tokens;
    auto look_ahead = [&](int i) { tokens.look_ahead(table, i * KV_BLOCK + 16 * warp, length, lane); };
    if (first >= last) return;
    look_ahead(first);
    tokens.aim(args);
    look_ahead(first + 1);
    tokens.load(lane);
    for (int i = first; i < last; i++, number++) {
      tokens.aim(args);
      look_ahead(i + 2);
      unpack(tokens, number);
    }
  }

  DEVICE_MEMBER void run() const {
    int number = 0;  // of the stages
    for (WorkRanges ranges(args, lane); ranges.range.b >= 0; ranges.advance(args)) {
      const WorkRange& range = ranges.range;
      const WorkTile tile(args, range.b, range.tile);
      const int first = range.first, last = min_i32(range.last, tile.kv_blocks(args));
      const i32* table = args.block_table + (i64)tile.sequence * args.table_stride;
      if constexpr (ROW_STRIDE > 0) {
        run_rows(table, tile.length, first, last, number);
        continue;
      }
      auto token_of = [&](int i) { return i * KV_BLOCK + 16 * warp; };
      auto page_of = [&](int i) { return token_of(i) < tile.length ? ldg_i32(table + token_of(i) / BLOCK_SIZE) : 0; };
      Tokens tokens;
      auto load = [&](i32 page, int i) {
        tokens.load(args.pages + page * args.page_stride, token_of(i) % BLOCK_SIZE, tile.length - token_of(i), lane);
      };
      i32 page = 0, ahead = 0, beyond = 0;  // of the next KV block and of those after it: none is waited for
      if (first < last) {
        load(page_of(first), first);
        page = page_of(first + 1), ahead = page_of(first + 2), beyond = page_of(first + 3);
      }
      for (int i = first; i < last; i++, number++) {
        unpack(tokens, number);
        if (i + 1 < last) {
          load(page, i + 1);
          page = ahead, ahead = beyond, beyond = page_of(i + 4);
        }
      }
    }
  }
};
