// The producer warpgroup of wide.cu, which unpacks KV blocks into stages of shared memory.
#pragma once
#include "latent/row_tokens.cuh"
#include "latent/schedule.cuh"
#include "latent/tile_tokens.cuh"

constexpr int CHUNKS = LD / 64, ROPE_CHUNKS = (RD + 63) / 64;  // chunks of 64 dimensions
constexpr int CHUNK = KV_BLOCK * 128, STAGE = (CHUNKS + ROPE_CHUNKS) * CHUNK;  // bytes

// Regions of shared memory, one after the other.
constexpr int QUERIES_AT = 0, RING_AT = STAGE, PROBABILITIES_AT = RING_AT + STAGES * STAGE,
              ROW_MAX_AT = PROBABILITIES_AT + 8192, SCALES_AT = ROW_MAX_AT + 256,
              BARRIERS_AT = SCALES_AT + STAGES * sizeof(TokenScales), RANGES_AT = BARRIERS_AT + 64 * STAGES,
              ROPE_LEVELS_AT = RANGES_AT + 48;
static_assert(ROPE_LEVELS_AT + 2 * R_LEVELS == SHARED_BYTES && sizeof(WorkRanges) <= 48, "shared memory");

constexpr int ROPE = 4, ROPE_FREE = 2;  // the barriers of rope parts and scales

struct Producer {
  const LatentArgs& args;
  u8* const ring;
  TokenScales* const scales;  // [stage]
  u64* const full;  // [stage, 5]: quarters of the dimensions; rope parts and scales
  u64* const empty;  // [stage, 3]: halves of the dimensions; rope parts and scales
  const RopeLevels rope_levels;
  const int warp, lane;

  // The consumers execute the proxy fence, because here it would wait for loads.
  DEVICE_MEMBER void report(u64* to) const {
    sync_warp();
    if (lane == 0) mbarrier_arrive(to);
  }

  // Unpacks KV block `number` of this thread block to its stage. load_next() loads the first half of the next tokens.
  template <class T, class F, class G>
  DEVICE_MEMBER void unpack(T& tokens, int number, const F& prefetch_next, const G& load_next) const {
    const int stage = number % STAGES;
    const u32 to = shared_address(ring) + stage * STAGE + warp * 2048, turn = (u32)(number / STAGES & 1) ^ 1;
    u64* const quarters = full + 5 * stage;
    u64* const free = empty + 3 * stage;
    mbarrier_wait(free + ROPE_FREE, turn);  // free long before the dimensions
    tokens.unpack_rope(args.table, rope_levels, to + CHUNKS * CHUNK, scales[stage], 16 * warp, lane);
    report(quarters + ROPE);
    mbarrier_wait(free, turn);
    tokens.load_second(lane);
    prefetch_next();
    tokens.template unpack_latents<0>(args.table, to, lane);
    report(quarters);
    tokens.template unpack_latents<1>(args.table, to, lane);
    report(quarters + 1);
    mbarrier_wait(free + 1, turn);
    tokens.template unpack_latents<2, 0, 1>(args.table, to, lane);  // waits for the second half
    sync_warp();
    load_next();
    tokens.template unpack_latents<2, 1, 2>(args.table, to, lane);
    report(quarters + 2);
    tokens.template unpack_latents<3>(args.table, to, lane);
    report(quarters + 3);
  }

  // A range of single tokens (token rows). Slots are looked up one KV block ahead.
  DEVICE_MEMBER void run_rows(const i32* table, int length, int first, int last, int& number) const {
    RowTokens tokens;
    auto look_ahead = [&](int i) { tokens.look_ahead(table, i * KV_BLOCK + 16 * warp, length, lane); };
    auto load = [&](int i) {
      tokens.aim(args);
      look_ahead(i + 1);
      tokens.load_first(lane);
    };
    if (first >= last) return;
    look_ahead(first);
    load(first);
    for (int i = first; i < last; i++, number++) unpack(tokens, number, [] {}, [&] { load(i + 1); });
  }

  DEVICE_MEMBER void run() const {
    int number = 0;  // counts KV blocks over all ranges
    for (AnnouncedRanges ranges(args, lane, warp == 0 && lane == 0); ranges.range.b >= 0; ranges.advance(args)) {
      const WorkRange& range = ranges.range;
      const WorkTile tile(args, range.b, range.tile);
      const int first = range.first, last = min_i32(range.last, tile.kv_blocks(args));
      const i32* table = args.block_table + (i64)tile.sequence * args.table_stride;
      if constexpr (ROW_STRIDE > 0) {
        run_rows(table, tile.length, first, last, number);
        continue;
      }
      if (first >= last) continue;
      auto token_of = [&](int i) { return i * KV_BLOCK + 16 * warp; };
      auto place_at = [&](int i) { return (u32)token_of(i) % BLOCK_SIZE; };
      auto page_of = [&](int i) { return ldg_i32(table + (u32)min_i32(token_of(i), tile.length - 1) / BLOCK_SIZE); };
      Tokens tokens;
      auto load = [&](i32 page, int i) {
        tokens.load_first(args.pages + page * args.page_stride, place_at(i), tile.length - token_of(i), lane);
      };
      load(page_of(first), first);
      i32 page = page_of(first + 1);  // for the next KV block; a load in flight
      for (int i = first; i < last; i++, number++)
        unpack(
            tokens, number, [&] { prefetch_tokens(args.pages + page * args.page_stride, place_at(i + 1), lane); },
            [&] {
              load(page, i + 1);
              page = page_of(i + 2);
            });
    }
  }
};
