// Unpacks the tiles of later blocks into the workspace, with warps that have nothing else to do (AHEAD).
//
// An item is a sequence and a KV head. Items are numbered in the order in which blocks attend them: head by head, the
// last sequence first. A separate launch (unpack_first) unpacks the first `lead` items. Each other item is unpacked by
// the blocks of the item `lead` before it, each block taking a share of the tiles. The workspace holds `slots` items,
// more than `lead`: the tiles of an item replace those of the item `slots` before it, once all blocks have attended
// these. A block therefore waits only for blocks of lower number, which have already started.
#pragma once
#include "prefill/unpacker.cuh"

constexpr int GROUPS_OF_TILE = STEP / 16;

DEVICE int item_of(const Work& w) { return w.head * w.present + w.present - 1 - w.s.rank; }

// The sequence, its length, its first tile and the head of an item that there is.
DEVICE void find_item(const PrefillArgs& args, int item, int present, int lane, Work& w) {
  w.head = item / present;
  w.sequence = sequence_of_rank(args.cu_seqlens_q, args.num_seqs, args.max_decode_queries,
      args.first_rank + present - 1 - item % present, lane);
  w.s = prefill_sequence_at(args.cu_seqlens_q, args.seq_lens, w.sequence);
  w.origin = origin_of(args, w.s);
}

DEVICE int end_tile_of(const Work& w) { return (w.s.length + STEP - 1) / STEP; }

// Groups `group` to `end_group` of 16 tokens of a tile, by a warp.
DEVICE void unpack_tile(const PrefillArgs& args, const Work& w, LevelTable key_levels, LevelTable value_levels,
    int item, int tile, int group, int end_group, int lane) {
  Unpacker unpacker = {args, w, key_levels, value_levels, 0, lane};
  const i64 row = (i64)(item % args.slots) * args.tiles + tile - w.origin;
  const i32 page = unpacker.page_of(tile);
  const u8* const own_page = unpacker.page_at(page);
  const int own_place = (tile * STEP + PER_LANE * lane) % BLOCK_SIZE;
  if (const int of_lane = PER_LANE * lane / 16;
      of_lane >= group && of_lane < end_group) {  // its tokens' part of the codes, to the L2 cache
    constexpr int K_PART = PER_LANE * K_TILE / 16, V_PART = PER_LANE * V_TILE / 16;
    UNROLL_FOR (int i = 0; i < K_PART; i += 128) prefetch_l2(own_page + own_place / PER_LANE * K_PART + i);
    UNROLL_FOR (int i = 0; i < V_PART; i += 128) prefetch_l2(own_page + V_CODES + own_place / PER_LANE * V_PART + i);
  }
  Fields fields;
  fields.load_from_page(own_page, own_place);
  const TileScale unit = unpacker.scale(fields, tile);
  if (group == 0 && lane == 0) ((TileScale*)args.tile_scales)[row] = unit;
#pragma unroll 1
  for (; group < end_group; group++) {
    unpacker.warp = group;
    const u8* const from = unpacker.page_at(Unpacker::page_with(page, 16 * group));
    const int place = (tile * STEP + 16 * group) % BLOCK_SIZE / 16;
    Codes<K_BITS, S, false> key_codes[GROUPS];
    key_codes[0].load(from + place * K_TILE, lane);
    unpacker.store_keys(key_codes, fields, (u8*)args.keys + row * KEYS_BYTES);
    sync_warp();  // values are loaded when no register is needed for keys any more
    Codes<V_BITS, S, true> value_codes[GROUPS];
    value_codes[0].load(from + V_CODES + place * V_TILE, lane);
    unpacker.store_values(value_codes, fields, (u8*)args.values + row * VALUES_BYTES);
  }
}

// How many blocks attend the queries of a sequence.
DEVICE int blocks_of(const PrefillArgs& args, const Work& w) {
  const int queries_of_block = ROWS / args.group_size;
  return (w.s.queries + queries_of_block - 1) / queries_of_block;
}

DEVICE void wait_until(const i32* count, int enough) {
  while (ld_acquire(count) < enough) sleep_ns(200);
}

// What warp `warp` of three does of the block's share of a later item.
DEVICE void unpack_share(const PrefillArgs& args, const Work& block, LevelTable key_levels, LevelTable value_levels,
    int warp, int lane) {
  const int shares = blocks_of(args, block), share = block.first / (ROWS / args.group_size),
            item = item_of(block) + args.lead;
  Work w;
  if (item >= block.present * args.num_kv_heads) return;
  if (item >= args.slots) {
    find_item(args, item - args.slots, block.present, lane, w);
    wait_until(args.attended + item - args.slots, blocks_of(args, w));
  }
  find_item(args, item, block.present, lane, w);
  // Groups of 16 tokens, side by side, so that the warps of all shares have as many.
  const int first = GROUPS_OF_TILE * w.origin, groups = GROUPS_OF_TILE * end_tile_of(w) - first;
  const int of_share = (groups + shares - 1) / shares, begin = min_i32(groups, share * of_share),
            count = min_i32(of_share, groups - begin);
  const int of_warp = (count + 2) / 3, end = first + begin + min_i32(count, (warp + 1) * of_warp);
  for (int at = first + begin + warp * of_warp; at < end;) {
    const int tile = at / GROUPS_OF_TILE, group = at % GROUPS_OF_TILE,
              end_group = min_i32(GROUPS_OF_TILE, group + end - at);
    unpack_tile(args, w, key_levels, value_levels, item, tile, group, end_group, lane);
    sync_warp();
    if (lane == 0) fence_device(), add_relaxed(args.unpacked + item, end_group - group);
    at += end_group - group;
  }
}

// One thread: until all tiles of the block's item are there, for the copy engine.
DEVICE void wait_for_tiles(const PrefillArgs& args, const Work& w, int item) {
  wait_until(args.unpacked + item, GROUPS_OF_TILE * (end_tile_of(w) - w.origin));
  fence_proxy_async_global();
}

// Runs in the same thread after it has issued all copies: waits until the tiles are in shared memory, and then frees
// them in the workspace.
DEVICE void release_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, int item) {
  for (int i = max_i32(0, w.count - STAGES); i < w.count; i++) {
    mbarrier_wait(rings.keys_full + i % STAGES, i / STAGES & 1);
    mbarrier_wait(rings.values_full + i % STAGES, i / STAGES & 1);
  }
  fence_device();
  add_relaxed(args.attended + item, 1);
}
