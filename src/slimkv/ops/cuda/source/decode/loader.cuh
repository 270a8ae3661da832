// Prefetches the steps of a range into a warp's ring in shared memory. If a step is whole pages, one lane per page
// issues a bulk copy, which signals the slot's barrier (BULK). Otherwise all lanes copy. With one slot (STAGES = 1),
// keys are copied while values are multiplied and vice versa: half the memory, half the prefetch distance. Codes and
// fields are then copied separately.
#pragma once
#include "common/hopper.cuh"
#include "decode/schedule.cuh"

struct Loader : RangePages {
  u8* ring;
  u64* barriers;
  u32 phases;  // phase bit of each barrier
  int lane;
  i32 ids[BULK ? 1 : PAGES];  // pages of the next step to copy; BULK: the page that this lane copies

  DEVICE_MEMBER void init(u8* shared, int warp, int lane_) {
    ring = shared + RINGS_AT + warp * STAGES * SLOT;
    barriers = (u64*)(shared + BARRIERS_AT) + warp * BARRIERS;
    lane = lane_;
    phases = 0;
    if (BULK) {
      if (lane == 0)
        UNROLL_FOR (int i = 0; i < BARRIERS; i++) mbarrier_init(barriers + i, 1);
      fence_mbarrier_init();
      sync_warp();
    }
  }

  // Reads the page ids of a step, which lies in one page or consists of whole pages.
  DEVICE_MEMBER void look_up(int step) {
    UNROLL_FOR (int i = 0; i < (BULK ? 1 : PAGES); i++)
      ids[i] = ldg_i32(id_at(step, PIECES > 1 ? lane & (PIECES - 1) : i));
  }

  // Copies the keys, the values, or both, of a step, if it exists (`real`).
  template <bool KEYS = true, bool VALUES = true> DEVICE_MEMBER void copy(int step, int slot, bool real) const {
    u8* to = ring + slot * SLOT;
    if constexpr (BULK && STAGES == 1) {  // either keys or values
      constexpr int CODES = PIECE_TILES * (KEYS ? K_TILE : V_TILE), FIRST = KEYS ? 0 : K_NUMBER_OF_FIELDS;
      constexpr int OF_FIELDS = FIELD_STRIDE * (KEYS ? K_NUMBER_OF_FIELDS : V_NUMBER_OF_FIELDS);
      if (real && lane < 2 * PIECES) {
        const bool fields = lane >= PIECES;
        const int at = fields ? FIELDS_AT + FIRST * FIELD_STRIDE : KEYS ? 0 : VALUES_AT;
        if (lane == 0) mbarrier_arrive_expect_tx(barriers + VALUES, PIECES * (CODES + OF_FIELDS));
        cp_async_bulk(to + (PIECES > 1 ? (lane & (PIECES - 1)) * PIECE : 0) + at, pages + ids[0] * page_stride + at,
            fields ? OF_FIELDS : CODES, barriers + VALUES);
      }
    } else if constexpr (BULK) {
      if (PIECES == 1 ? real && lane == 0 : real && lane < PIECES) {
        if (PIECES == 1 || lane == 0) mbarrier_arrive_expect_tx(barriers + slot, FIELDS_END);
        cp_async_bulk(to + (PIECES > 1 ? lane * PIECE : 0), pages + ids[0] * page_stride, PIECE, barriers + slot);
      }
    } else {
      if (real)
        UNROLL_FOR (int i = 0; i < PAGES; i++) {
          const u8* page = pages + ids[i] * page_stride;
          const int inside = PAGES > 1 ? 0 : (begin_tile + NT * step) % (BLOCK_SIZE / 16);
          constexpr int TILES = NT / PAGES;
          if (KEYS) copy_piece<TILES * K_TILE>(to + i * TILES * K_TILE, page + inside * K_TILE);
          if (VALUES) copy_piece<TILES * V_TILE>(to + VALUES_AT + i * TILES * V_TILE, page + V_CODES + inside * V_TILE);
          constexpr int FIRST = KEYS ? 0 : K_NUMBER_OF_FIELDS, END = VALUES ? FIELDS : K_NUMBER_OF_FIELDS;
          copy_fields<32 * TILES, FIRST, END>(to + FIELDS_AT + 32 * TILES * i, page + 32 * inside);
        }
      cp_async_commit();
    }
  }

  // Waits for the copy to this slot, which is the oldest one, if its step exists (`real`).
  DEVICE_MEMBER void wait(int slot, bool real) {
    if (!BULK) {
      cp_async_wait<STAGES == 1 ? 1 : STAGES - 2>();
    } else if (real) {
      mbarrier_wait(barriers + slot, phases >> slot & 1);
      phases ^= 1u << slot;
    }
    sync_warp();
  }

  // With one slot: waits for the values. `wait` waits for the keys.
  DEVICE_MEMBER void wait_for_values() {
    if (!BULK) cp_async_wait<0>();
    else mbarrier_wait(barriers + 1, phases >> 1 & 1), phases ^= 2;
    sync_warp();
  }

  DEVICE_MEMBER void wait_for_all() const {
    if (!BULK) {
      cp_async_wait<0>();
      sync_warp();
    }
  }

  template <int BYTES> DEVICE_MEMBER void copy_piece(u8* to, const u8* from) const {
    copy_lines<BYTES, 0>(shared_address(to) + 16 * lane, from + 16 * lane);
  }
  template <int BYTES, int AT> DEVICE_MEMBER void copy_lines(u32 to, const u8* from) const {
    if (AT + 512 <= BYTES || AT + 16 * lane < BYTES) cp_async_16_behind<AT>(to, from);
    if constexpr (AT + 512 < BYTES) copy_lines<BYTES, AT + 512>(to, from);
  }

  // Copies BYTES of each field from FIRST to END.
  template <int BYTES, int FIRST, int END> DEVICE_MEMBER void copy_fields(u8* to, const u8* page) const {
    constexpr int EACH = BYTES / 16, LANES = EACH * (END - FIRST);
    UNROLL_FOR (int i = 0; i < LANES; i += 32) {
      const int f = FIRST + (i + lane) / EACH, at = 16 * ((i + lane) % EACH);
      if (i + 32 <= LANES || i + lane < LANES) cp_async_16(to + f * FIELD_STRIDE + at, page + field_offset(f) + at);
    }
  }
};
