// Unpacks the tiles of later thread blocks into the workspace, in otherwise idle warps (AHEAD).
//
// An earlier launch (unpack.cu) unpacks the first `lead` items (args.cuh). Item i + lead is unpacked by the blocks of
// item i, each of which takes a share of the tiles. The workspace holds `slots` items, more than `lead`: item i + slots
// replaces item i once all blocks of item i have finished. So a block waits only for blocks of lower index, which have
// already started.
#pragma once
#include "prefill/unpacker.cuh"
#include "prefill/work.cuh"

// The number of blocks that process the queries of a sequence.
DEVICE int blocks_of(const PrefillArgs& args, const Work& w) {
  const int queries_of_block = ROWS / args.group_size;
  return (w.s.queries + queries_of_block - 1) / queries_of_block;
}

DEVICE void wait_until(const i32* count, int enough) {
  while (ld_acquire(count) < enough) sleep_ns(200);
}

// Warp `warp` of three: unpacks its part of the block's share of a later item.
DEVICE void unpack_share(const PrefillArgs& args, const Work& block, const Levels& levels, int warp, int lane) {
  const int shares = blocks_of(args, block), share = block.first / (ROWS / args.group_size),
            item = item_of(block) + args.lead;
  if (item >= block.present * args.num_kv_heads) return;
  if (item >= args.slots) {
    const Work before = find_item(args, item - args.slots, block.present, lane);
    wait_until(args.attended + item - args.slots, blocks_of(args, before));
  }
  const Work w = find_item(args, item, block.present, lane);
  // Work is divided into groups of 16 tokens, so that all warps get about the same share.
  const int first = GROUPS_OF_TILE * w.origin, groups = GROUPS_OF_TILE * end_tile_of(w) - first;
  const int of_share = (groups + shares - 1) / shares, begin = min_i32(groups, share * of_share),
            count = min_i32(of_share, groups - begin);
  const int of_warp = (count + 2) / 3, end = first + begin + min_i32(count, (warp + 1) * of_warp);
  for (int at = first + begin + warp * of_warp; at < end;) {
    const int tile = at / GROUPS_OF_TILE, group = at % GROUPS_OF_TILE,
              end_group = min_i32(GROUPS_OF_TILE, group + end - at);
    unpack_groups(args, w, levels, tile, group, end_group, lane);
    sync_warp();
    if (lane == 0) fence_device(), add_relaxed(args.unpacked + item, end_group - group);
    at += end_group - group;
  }
}

// One thread: waits until all tiles of the block's item are visible to bulk copies.
DEVICE void wait_for_tiles(const PrefillArgs& args, const Work& w, int item) {
  wait_until(args.unpacked + item, GROUPS_OF_TILE * (end_tile_of(w) - w.origin));
  fence_proxy_async_global();
}

// That thread, after issuing all copies: waits until tiles are in shared memory, then releases the workspace.
DEVICE void release_tiles(const PrefillArgs& args, const Work& w, const Rings& rings, int item) {
  for (int i = max_i32(0, w.count - STAGES); i < w.count; i++) {
    mbarrier_wait(rings.keys_full + i % STAGES, i / STAGES & 1);
    mbarrier_wait(rings.values_full + i % STAGES, i / STAGES & 1);
  }
  fence_device();
  add_relaxed(args.attended + item, 1);
}
