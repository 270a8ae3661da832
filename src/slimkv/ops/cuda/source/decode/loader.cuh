// Copies the steps of a range into a warp's ring of shared memory, ahead of their use.
#pragma once
#include "decode/schedule.cuh"

struct Loader {
  const u8* pages;
  const i32* table;
  i64 page_stride;
  u8* ring;
  int lane, last_page, begin_tile;
  i32 ids[PAGES];  // the pages of the next step to be copied

  DEVICE_MEMBER void open(const DecodeArgs& args, const WorkRange& p) {
    page_stride = args.page_stride;
    pages = args.pages + (i64)p.head * args.page_head_stride;
    table = args.block_table + (i64)p.b * args.table_stride;
    begin_tile = p.s.begin / 16;
    last_page = (p.s.length - 1) / BLOCK_SIZE;
  }

  // A step lies in one page, or in several whole ones.
  DEVICE_MEMBER void look_up(int step) {
#pragma unroll
    for (int i = 0; i < PAGES; i++) ids[i] = ldg_i32(table + min_i32((begin_tile + NT * step) / (BLOCK_SIZE / 16) + i, last_page));
  }

  DEVICE_MEMBER void copy(int step, int slot) const {
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
      const u8* page = pages + ids[i] * page_stride;
      const int inside = PAGES > 1 ? 0 : (begin_tile + NT * step) % (BLOCK_SIZE / 16);
      constexpr int TILES = NT / PAGES;
      u8* to = ring + slot * SLOT + i * TILES * TILE;
      const u8* keys = page + inside * K_TILE + 16 * lane;
      const u8* values = page + V_CODES + inside * V_TILE + 16 * lane;
      // 32 bytes of each field and tile: two lanes each
      constexpr int FIELDS = K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS;
      const int field = lane / 2;
      const u8* fields = page + 32 * inside + 16 * (lane & 1) +
                         (field < K_NUMBER_OF_FIELDS ? K_FIELDS + 2 * BLOCK_SIZE * field
                                                     : V_FIELDS + 2 * BLOCK_SIZE * (field - K_NUMBER_OF_FIELDS));
#pragma unroll
      for (int x = 0; x < TILES; x++) {
        copy_lines<K_TILE>(to + x * TILE, keys + x * K_TILE);
        copy_lines<V_TILE>(to + x * TILE + K_TILE, values + x * V_TILE);
        if (lane < 2 * FIELDS) cp_async_16(to + x * TILE + FIELDS_AT + 16 * lane, fields + 32 * x);
      }
    }
  }

  template <int BYTES> DEVICE_MEMBER void copy_lines(u8* to, const u8* from) const {
#pragma unroll
    for (int i = 0; i < BYTES; i += 512)
      if (i + 512 <= BYTES || i + 16 * lane < BYTES) cp_async_16(to + i + 16 * lane, from + i);
  }
};
