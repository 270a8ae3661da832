"""Decode context parallelism: several ranks share the tokens of the same KV heads.

Every rank attends to the earlier tokens that it holds, for the query heads of all ranks, and results are merged by
log-sum-exp. Every rank has all tokens of the current step: it stores them as codes in scratch pages and attends to
those. All keys and values thus pass through the codec, as they do without context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.ops import AttentionBatch, PackedKV, Rounding
from slimkv.ops.merge import merge_attention_states
from slimkv.spec import page_layout

NEW_BLOCK = 64  # block size of the pages of the current step


@dataclass(frozen=True)
class DCPConfig:
    """How tokens are distributed: round-robin over ranks, ``interleave`` consecutive tokens at a time."""

    ranks: int
    rank: int
    interleave: int

    def held(self, lengths: Tensor) -> Tensor:
        """How many of a sequence's first ``lengths`` tokens this rank holds: int32, same shape."""
        whole = lengths // (self.interleave * self.ranks) * self.interleave
        rest = lengths - whole * self.ranks - self.rank * self.interleave
        return (whole + rest.clamp(0, self.interleave)).to(torch.int32)

    def most_held(self, length: int) -> int:
        """An upper bound on ``held`` for lengths up to ``length``."""
        return -(-length // (self.interleave * self.ranks)) * self.interleave


@dataclass(frozen=True)
class ShardTables:
    """The tables that decode context parallelism adds to a part of a step."""

    context_lens: Tensor  # int32 [requests]: earlier tokens that this rank holds
    max_context_len: int
    new_lens: Tensor  # int32 [requests]: tokens of the step
    new_slots: Tensor  # int64 [queries]: their slots in the scratch pages
    new_table: Tensor  # int32 [requests, blocks]
    new_blocks: int


def shard_tables(sharing: DCPConfig, batch: AttentionBatch, queries: int) -> ShardTables:
    """Builds the tables on the device. ``batch`` has lengths over all ranks; ``queries``: how many there are."""
    seq_lens, cu_seqlens_q = batch.seq_lens, batch.cu_seqlens_q
    requests, device = seq_lens.shape[0], seq_lens.device
    new_lens = cu_seqlens_q.diff()
    # Request i starts at block cu_seqlens_q[i] // NEW_BLOCK + i, so that requests share no block; no host sync.
    first = cu_seqlens_q[:-1].long() // NEW_BLOCK + torch.arange(requests, device=device)
    row = torch.arange(queries, device=device)
    request = (torch.searchsorted(cu_seqlens_q.long(), row, right=True) - 1).clamp(max=requests - 1)
    inside = row - cu_seqlens_q.long()[request]
    slots = (first[request] + inside // NEW_BLOCK) * NEW_BLOCK + inside % NEW_BLOCK
    blocks = queries // NEW_BLOCK + requests
    columns = torch.arange(-(-batch.max_query_len // NEW_BLOCK), device=device)
    table = (first[:, None] + columns).clamp(max=blocks - 1).to(torch.int32)
    context = sharing.held(seq_lens - new_lens)
    return ShardTables(context, sharing.most_held(batch.max_seq_len), new_lens, slots, table, blocks)


def attend_shards(
    query: Tensor, fresh: tuple[Tensor, Tensor], kv: PackedKV, batch: AttentionBatch, tables: ShardTables, group: Any,
    *, options: ops.AttendOptions, rounding: Rounding | None, raw: bool, out: Tensor, backend: str | None,
) -> None:  # fmt: skip
    """Attends to the tokens of all ranks.

    Args:
        query: [queries, heads, dim], this rank's heads.
        fresh: K and V of the step's tokens [queries, num_kv_heads, dim], equal on every rank.
        kv, batch: the cached tokens that this rank holds.
        group: vLLM's ``GroupCoordinator`` of the ranks that share tokens.
        raw: whether attention reads the step's tokens unquantised.
        out: [queries, heads, value_dim], written in place.
    """
    own = page_layout(kv.layout.spec, NEW_BLOCK)
    new = replace(kv, pages=kv.pages.new_empty(tables.new_blocks, kv.pages.shape[1], own.page_bytes), layout=own)
    ops.store_kv(*fresh, new, tables.new_slots, rounding, backend=backend)
    most = batch.max_query_len
    new_batch = AttentionBatch(tables.new_table, tables.new_lens, batch.cu_seqlens_q, most, most)

    def states(query: Tensor, *call: Any, **given: Any) -> tuple[Tensor, Tensor]:
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        into = query.new_empty(*query.shape[:2], out.shape[2], dtype=torch.float32)
        return ops.attend(query, *call, **given, out=into, lse=lse, backend=backend), lse

    own_states = states(query, new, new_batch, options, fresh=fresh if raw else None)
    held = batch.block_table.shape[1] * kv.layout.block_size
    past = AttentionBatch(
        batch.block_table, tables.context_lens, batch.cu_seqlens_q, most, min(tables.max_context_len, held)
    )
    context = states(group.all_gather(query.contiguous(), 1), kv, past, replace(options, causal=False))
    out.copy_(merge_attention_states(own_states, combined(*context, group)))


def combined(out: Tensor, lse: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Merges the ranks' ``out`` [queries, all heads, dim] and ``lse`` [queries, all heads]; keeps this rank's heads."""
    total = torch.logsumexp(group.all_gather(lse[None].contiguous(), 0), 0)
    weight = torch.where(total == -torch.inf, 0.0, torch.exp(lse - total))
    mine = group.reduce_scatter((out * weight[..., None]).contiguous(), 1)
    heads = mine.shape[1]
    return mine, total[:, group.rank_in_group * heads :][:, :heads]
