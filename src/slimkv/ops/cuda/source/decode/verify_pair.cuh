// A pair of warpgroups: its shared memory and loader.
//
// Slots of a pair's ring are whole steps. The value warpgroup is the last to need a slot, so it refills it.
// Probabilities pass through two buffers, each with a `published` (full) and a `used` (empty) barrier.
#pragma once
#include "common/hopper.cuh"
#include "decode/schedule.cuh"
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
  DEVICE_MEMBER void wait_until_published(u32 number) const { mbarrier_wait(published + (number & 1), number / 2 & 1); }
  // Returns at once for -1 and -2.
  DEVICE_MEMBER void wait_until_used(u32 number) const { mbarrier_wait(used + (number & 1), number / 2 & 1); }
};

constexpr int AHEAD = STAGES - 1;  // steps that are copied before they are needed

// What a value warp needs to copy its pages: of each step, page `member` and every TEAM-th after it. It is in shared
// memory because the compiler would spill it in every step.
struct PageCursor {
  static constexpr int OWN_PAGES = (PIECES + TEAM - 1) / TEAM;
  RangePages source;
  i32 ids[2][OWN_PAGES];  // of the next copies, even and odd steps
};
static_assert(sizeof(PageCursor) <= CURSOR_BYTES, "room for a cursor");

// Copies the steps of a range: the first ones with a lane per page, the others with a lane of each value warp, because
// bulk copies of several lanes are issued one after the other.
struct PairLoader {
  PageCursor& cursor;
  TeamWarp warp;
  int lane;

  DEVICE_MEMBER PairLoader(u8* shared, const TeamWarp& warp_, int lane_)
      : cursor(((PageCursor*)(shared + CURSORS_AT))[warp_.pair * TEAM + warp_.member]), warp(warp_), lane(lane_) {}

  DEVICE_MEMBER static void copy_page(const PairMemory& memory, const RangePages& source, i32 id, u32 number,
      int piece) {
    u64* full = memory.full + number % STAGES;
    if (piece == 0) mbarrier_arrive_expect_tx(full, FIELDS_END);
    cp_async_bulk(memory.slot(number) + piece * PIECE, source.pages + id * source.page_stride, PIECE, full);
  }
  // Initialises the barriers; by the first warp of each pair.
  DEVICE_MEMBER void init(const PairMemory& memory) const {
    if (lane == 0) {
      for (int i = 0; i < BARRIERS; i++) mbarrier_init(memory.full + i, 1);
      for (int i = 0; i < 2; i++) mbarrier_init(memory.published + i, 1), mbarrier_init(memory.used + i, 4);
    }
    fence_mbarrier_init();
    sync_warp();
  }
  // Fills the ring, one lane per page; by the first warp of each pair.
  DEVICE_MEMBER void fill(const PairMemory& memory, const DecodeArgs& args, const DecodeRange& range, u32 taken) const {
    static_assert(AHEAD * PIECES <= 32, "a lane for each");
    RangePages source;
    source.open(args, range);
    const int ahead = lane / PIECES, piece = lane % PIECES, step = range.first + warp.pair + ahead * RINGS;
    if (ahead < AHEAD && step < range.last)
      copy_page(memory, source, ldg_i32(source.id_at(step, piece)), taken + ahead, piece);
  }
  // Prepares copy_ahead.
  DEVICE_MEMBER void open(const DecodeArgs& args, const DecodeRange& range, u32 taken) const {
    if (lane || warp.member >= PIECES) return;
    cp_async_wait<0>();  // for ids that the range before did not need
    cursor.source.open(args, range);
    request_ids(range.first + warp.pair, taken);
  }
  // Requests the page ids that `copy_ahead` takes in this step.
  DEVICE_MEMBER void request_ids(int step, u32 number) const {
    UNROLL_FOR (int i = 0; i < PageCursor::OWN_PAGES; i++)
      cp_async_4(&cursor.ids[number & 1][i], cursor.source.id_at(step + AHEAD * RINGS, warp.member + TEAM * i));
    cp_async_commit();
  }
  // Copies the step that follows `step` by AHEAD.
  DEVICE_MEMBER void copy_ahead(const PairMemory& memory, const DecodeRange& range, int step, u32 number) const {
    if (lane || warp.member >= PIECES || step + AHEAD * RINGS >= range.last) return;
    memory.wait_until_used(number - 1);
    cp_async_wait<0>();
    UNROLL_FOR (int i = 0; i < PageCursor::OWN_PAGES; i++)
      if (warp.member + TEAM * i < PIECES)
        copy_page(memory, cursor.source, cursor.ids[number & 1][i], number + AHEAD, warp.member + TEAM * i);
    request_ids(step + RINGS, number + 1);
  }
};

// The wgmma of a warpgroup, with all columns.
typedef WgmmaNarrow<8 * NG, false> WarpgroupProduct;
