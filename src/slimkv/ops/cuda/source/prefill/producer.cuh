// Producer warpgroups, which unpack tiles from pages into the rings of shared memory for the consumers (FUSED).
// Defines: PACKED_STAGES (tiles whose pages are in shared memory at a time), PACKED_BYTES (per tile).
#pragma once
#include "common/hopper.cuh"
#include "prefill/unpacker.cuh"
#include "prefill/work.cuh"

// A warp copies the codes of its own tokens of a tile, and the fields of all tokens: scales, then zeros.
constexpr int PACKED_OF_WARP = PACKED_BYTES / (4 * PRODUCERS);

struct Producer : Unpacker {
  const Rings& rings;
  u8* packed;  // this warp's part of the first stage of packed tiles

  // Copies the warp's part of the pages of a tile to a stage. `page`: the lane's page (page_of).
  DEVICE_MEMBER void copy(int tile, i32 page, u8* to) const {
    auto copy_codes = [&](const u8* from, int bytes, u8* at) {
      UNROLL_FOR (int i = 0; i < bytes; i += 512)
        if (bytes - i >= 512 || 16 * lane < bytes - i) cp_async_16(at + i + 16 * lane, from + i + 16 * lane);
    };
    UNROLL_FOR (int q = 0; q < GROUPS; q++) {
      const int place = (tile * STEP + 16 * (GROUPS * warp + q)) % BLOCK_SIZE / 16;
      const u8* from = page_at(page_with(page, 16 * (GROUPS * warp + q)));
      copy_codes(from + place * K_TILE, K_TILE, to + q * K_TILE);
      copy_codes(from + V_CODES + place * V_TILE, V_TILE, to + GROUPS * K_TILE + q * V_TILE);
    }
    constexpr int UNITS = FIELD_BYTES / 16;  // units of 8 tokens
    UNROLL_FOR (int i = 0; i < FIELD_ARRAYS * UNITS; i += 32) {
      const int unit = (i + lane) % UNITS, array = (i + lane) / UNITS;
      const u8* from = page_at(page_with(page, 8 * unit)) + 2 * ((tile * STEP + 8 * unit) % BLOCK_SIZE);
      if (array < FIELD_ARRAYS)
        cp_async_16(to + GROUPS * (K_TILE + V_TILE) + array * FIELD_BYTES + 16 * unit, from + Fields::in_page(array));
    }
  }

  // Pages pass through shared memory, several tiles ahead. With loads to registers, waiting for one tile would also
  // wait for the loads just issued for later tiles.
  DEVICE_MEMBER void run() const {
    constexpr int IN_FLIGHT = PACKED_STAGES - 1;
    if (w.count == 0) return;
    UNROLL_FOR (int i = 0; i < IN_FLIGHT; i++) {
      if (i < w.count) copy(tile_at(w, i), page_of(tile_at(w, i)), packed + i * PACKED_BYTES);
      cp_async_commit();
    }
    i32 page = IN_FLIGHT < w.count ? page_of(tile_at(w, IN_FLIGHT)) : 0;
    Place place = {0, 0};
    int read = 0, write = IN_FLIGHT * PACKED_BYTES;  // stages
    auto advance = [](int& stage) { stage = stage == IN_FLIGHT * PACKED_BYTES ? 0 : stage + PACKED_BYTES; };
    for (int i = 0; i < w.count; i++) {
      if (i + IN_FLIGHT < w.count) copy(tile_at(w, i + IN_FLIGHT), page, packed + write);
      cp_async_commit();
      if (i + IN_FLIGHT + 1 < w.count) page = page_of(tile_at(w, i + IN_FLIGHT + 1));
      cp_async_wait<IN_FLIGHT>();
      sync_warp();
      const u8* const from = packed + read;
      Fields fields;
      fields.load<false>(from + GROUPS * (K_TILE + V_TILE), PER_LANE * lane);
      const TileScale unit = scale(fields, tile_at(w, i));
      Codes<K_BITS, S, false> key_codes[GROUPS];
      UNROLL_FOR (int q = 0; q < GROUPS; q++) key_codes[q].load(from + q * K_TILE, lane);
      mbarrier_wait(rings.keys_empty + place.slot, place.parity ^ 1);
      if (warp == 0 && lane == 0) ((TileScale*)rings.scales)[place.slot] = unit;
      store_keys(key_codes, fields, rings.keys + place.slot * KEYS_BYTES);
      fence_proxy_async();
      sync_warp();
      if (lane == 0) mbarrier_arrive(rings.keys_full + place.slot);
      Codes<V_BITS, S, true> value_codes[GROUPS];
      UNROLL_FOR (int q = 0; q < GROUPS; q++) value_codes[q].load(from + GROUPS * K_TILE + q * V_TILE, lane);
      mbarrier_wait(rings.values_empty + place.slot, place.parity ^ 1);
      store_values(value_codes, fields, rings.values + place.slot * VALUES_BYTES);
      fence_proxy_async();
      sync_warp();
      if (lane == 0) mbarrier_arrive(rings.values_full + place.slot);
      place = place.next();
      advance(read), advance(write);
    }
  }
};
