// A pair of warpgroups: its shared memory and loader.
//
// Slots of a pair's ring are whole steps. The value warpgroup is the last to need a slot, so its first warp refills it.
// Probabilities pass through two buffers, each with a `published` (full) and a `used` (empty) barrier.
#pragma once
#include "decode/loader.cuh"
#include "decode/verify_team.cuh"

// The shared memory of a pair of warpgroups.
struct PairMemory {
  u8 *ring, *probabilities;
  float* factors;  // of two steps: COLUMNS rescaling factors, then whether to apply them
  u64 *full, *published, *used;

  // `kept`: in per-lane registers. The compiler would recompute the addresses in every step otherwise.
  DEVICE_MEMBER PairMemory(u8* shared, int pair, int lane, bool kept) {
    auto at = [&](int offset) { return shared + (kept ? (int)in_register((u32)offset, lane) : offset); };
    ring = at(RINGS_AT + pair * STAGES * SLOT);
    probabilities = at(PROBABILITIES_AT + pair * 2 * OWN_TILES * OPERAND_BYTES);
    factors = (float*)at(FACTORS_AT + pair * 2 * (COLUMNS + 2) * 4);
    full = (u64*)at(BARRIERS_AT + pair * BARRIERS * 8);
    published = (u64*)at(PAIR_BARRIERS_AT + pair * 4 * 8);
    used = published + 2;
  }
  // `number` counts the pair's steps over all ranges.
  DEVICE_MEMBER u8* slot(u32 number) const { return ring + number % STAGES * SLOT; }
  DEVICE_MEMBER u8* probabilities_of(u32 number) const {
    return probabilities + (number & 1) * OWN_TILES * OPERAND_BYTES;
  }
  DEVICE_MEMBER float* factors_of(u32 number) const { return factors + (number & 1) * (COLUMNS + 2); }
  DEVICE_MEMBER void wait_for_copy(u32 number) const { mbarrier_wait(full + number % STAGES, number / STAGES & 1); }
  DEVICE_MEMBER void wait_until_published(u32 number) const {
    mbarrier_wait(published + (number & 1), number >> 1 & 1);
  }
  DEVICE_MEMBER void wait_until_used(u32 number) const {
    mbarrier_wait(used + (number & 1), number >> 1 & 1);
  }  // returns at once for -1 and -2
};

// Copies the steps of a range, one after the other.
struct PairLoader {
  Loader loader;
  int next, last;
  u32 filled;

  DEVICE_MEMBER void init(u8* shared, const PairMemory& memory, int pair, int lane) {
    if (lane == 0)
      for (int i = 0; i < 2; i++) mbarrier_init(memory.published + i, 1), mbarrier_init(memory.used + i, 4);
    loader.init(shared, pair, lane);
    filled = 0;
  }
  DEVICE_MEMBER void copy_next() {
    if (next >= last) return;
    loader.copy(next, filled % STAGES, true);
    filled++, next += RINGS;
    loader.look_up(min_i32(next, last - 1));
  }
  DEVICE_MEMBER void open(const DecodeArgs& args, const DecodeRange& range, int pair) {
    next = range.first + pair, last = range.last;
    if (next >= last) return;
    loader.open(args, range);
    // Fills the ring, one lane per page.
    constexpr int STEPS = STAGES - 1;
    static_assert(STEPS * PIECES <= 32, "a lane for each");
    const int of_step = loader.lane / PIECES, piece = loader.lane % PIECES, step = next + of_step * RINGS;
    const bool real = of_step < STEPS && step < last;
    const i32 id = real
        ? ldg_i32(loader.table + min_i32((loader.begin_tile + NT * step) / (BLOCK_SIZE / 16) + piece, loader.last_page))
        : 0;
    if (real) {
      const int slot = (filled + of_step) % STAGES;
      if (piece == 0) mbarrier_arrive_expect_tx(loader.barriers + slot, FIELDS_END);
      cp_async_bulk(loader.ring + slot * SLOT + piece * PIECE, loader.pages + id * loader.page_stride, PIECE,
          loader.barriers + slot);
    }
    const int count = min_i32(STEPS, (last - next + RINGS - 1) / RINGS);
    filled += count, next += count * RINGS;
    loader.look_up(min_i32(next, last - 1));
  }
};

// The wgmma of a warpgroup, with all columns.
typedef WgmmaNarrow<8 * NG, false> WarpgroupProduct;
