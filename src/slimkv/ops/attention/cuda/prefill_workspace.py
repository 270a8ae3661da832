"""The workspace of unpacked tiles: refilled in every pass, or a ring into which blocks unpack for later blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.ops.attention.api import AttendRequest
from slimkv.ops.attention.cuda.prefill_defines import PrefillConfig
from slimkv.spec import PageLayout

WORKSPACE_BYTES = 400 << 20  # limit for unpacked K and V


@dataclass(frozen=True)
class Batch:
    """The properties of a request that determine its passes."""

    sequences: int  # upper bound on the number of prefilled sequences
    num_kv_heads: int
    blocks: int  # blocks of queries per KV head, over all sequences
    tiles: int  # per sequence, at most


def seen_tokens(request: AttendRequest, queries: int) -> int:
    """The most tokens of a sequence that ``queries`` consecutive queries see."""
    window = request.options.sliding_window
    return max(1, request.max_seq_len if window is None else min(request.max_seq_len, queries + window - 1))


def seen_tiles(request: AttendRequest, tile_tokens: int) -> int:
    """The maximum number of tiles that the queries of a sequence see: a window may start anywhere in its first tile."""
    seen, longest = seen_tokens(request, request.max_query_len), max(1, request.max_seq_len)
    return min(-(-longest // tile_tokens), (seen + tile_tokens - 2) // tile_tokens + 1)


def plan_passes(
    layout: PageLayout, config: PrefillConfig, batch: Batch, multiprocessors: int, budget: int = WORKSPACE_BYTES
) -> tuple[int, int]:
    """How many sequences, and how many tiles of each, the workspace holds at a time. Whole sequences need no
    partial results, so they are preferred if there are enough of them to keep the device busy.
    """
    longest, tile = batch.tiles, 2 * config.tile_bytes(layout.spec.key_dim) * batch.num_kv_heads
    whole = min(batch.sequences, budget // (tile * longest))
    if whole and whole * batch.num_kv_heads * batch.blocks >= 0.9 * multiprocessors * batch.sequences:
        return _sequences_of_a_pass(batch, whole, multiprocessors), longest
    if whole == batch.sequences:
        return whole, longest
    return batch.sequences, max(1, min(budget // (tile * batch.sequences), longest))


def _sequences_of_a_pass(batch: Batch, most: int, multiprocessors: int) -> int:
    """How many sequences per pass leave the fewest multiprocessors idle at the end; each pass has a small cost."""

    def rounds(sequences: int) -> int:
        return -(-sequences * batch.num_kv_heads * batch.blocks // (batch.sequences * multiprocessors))

    def cost(sequences: int) -> float:
        whole, rest = divmod(batch.sequences, sequences)
        return whole * rounds(sequences) + rounds(rest) + 0.1 * (whole + (rest > 0))

    return min(range(max(1, most // 2, most - 15), most + 1), key=cost)


@dataclass(frozen=True)
class AheadPlan:
    """How blocks unpack ahead (source/prefill/ahead.cuh). An item is a KV head of a sequence."""

    items: int
    blocks: int  # per item, for sequences of equal length
    tiles: int  # per item, at most
    lead: int  # items unpacked before the first block
    slots: int  # items that fit the workspace

    @property
    def flows(self) -> bool:
        """Whether unpacking seldom waits for blocks that still read the tiles it overwrites."""
        return self.slots >= min(self.items, 2 * self.lead)


def plan_ahead(
    request: AttendRequest, config: PrefillConfig, sequences: int, multiprocessors: int, budget: int
) -> AheadPlan:
    """The plan for up to ``sequences`` sequences and a workspace of ``budget`` bytes, or more if that is too few.

    The first ``lead`` items keep nearly all multiprocessors busy. Their blocks unpack the next ``lead`` items.
    """
    dim, tiles = request.layout.spec.key_dim, seen_tiles(request, config.tile_tokens)
    items = sequences * request.pages.shape[1]
    blocks = -(-request.max_query_len * request.group // config.rows)
    lead = min(items, -(-95 * multiprocessors // (100 * blocks)))
    room = budget // (tiles * 2 * config.tile_bytes(dim))
    return AheadPlan(items, blocks, tiles, lead, min(items, max(lead + 1, room)))


def lay_out(args: ctypes.Structure, plan: AheadPlan, config: PrefillConfig, dim: int, device: torch.device) -> Tensor:
    """Allocates the workspace (keys, values, their scales, counters) and points ``args`` into it."""
    tiles = plan.slots * plan.tiles
    side = tiles * config.tile_bytes(dim)  # bytes of keys; values have as many
    space = torch.empty(2 * side + 16 * tiles + 8 * plan.items, dtype=torch.uint8, device=device)
    args.keys = space.data_ptr()
    args.values = args.keys + side
    args.tile_scales = args.values + side
    args.unpacked = args.tile_scales + 16 * tiles
    args.attended = args.unpacked + 4 * plan.items
    args.tiles, args.ranks, args.section = plan.tiles, plan.items // args.num_kv_heads, 1
    args.first_pass, args.last_pass = 1, 1
    args.lead, args.slots = plan.lead, plan.slots
    return space
