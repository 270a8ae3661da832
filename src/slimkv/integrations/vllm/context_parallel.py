"""Decode context parallelism: several ranks hold the tokens of the same KV heads, each its share of them.

What came before a step is attended by every rank on the tokens it holds, for the query heads of all ranks; the
log-sum-exps say how much each result counts. A step's own tokens are known to every rank: it stores them, as codes, in
pages of the step's own, and attends these alone. So everything attended has gone through the codec, as without shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.ops.merge import merge_attention_states
from slimkv.spec import PageLayout, page_layout

NEW_BLOCK = 64  # tokens of a block of the step's own pages


class Group(Protocol):
    """The ranks that share tokens; vLLM's ``GroupCoordinator`` is one."""

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: Tensor, dim: int) -> Tensor:
        """Every rank's tensor, one after the other along ``dim``."""

    def reduce_scatter(self, input_: Tensor, dim: int) -> Tensor:
        """The sum of every rank's tensor, of which each gets its share along ``dim``."""


@dataclass(frozen=True)
class DCPConfig:
    """How tokens are dealt out: ``interleave`` of them to a rank, then to the next."""

    ranks: int
    rank: int
    interleave: int

    def held(self, lengths: Tensor) -> Tensor:
        """How many of a sequence's first ``lengths`` tokens this rank holds: int32, same shape."""
        whole = lengths // (self.interleave * self.ranks) * self.interleave
        rest = lengths - whole * self.ranks - self.rank * self.interleave
        return (whole + rest.clamp(0, self.interleave)).to(torch.int32)

    def most_held(self, length: int) -> int:
        """A bound on ``held`` for lengths up to ``length``."""
        return -(-length // (self.interleave * self.ranks)) * self.interleave


@dataclass(frozen=True)
class ShardTables:
    """What a part of a step needs beside its own tables."""

    context_lens: Tensor  # int32 [requests]: tokens before the step that this rank holds
    max_context_len: int
    new_lens: Tensor  # int32 [requests]: tokens of the step
    new_slots: Tensor  # int64 [queries]: where they lie in pages of the step's own
    new_table: Tensor  # int32 [requests, blocks]
    new_blocks: int


def shard_tables(
    sharing: DCPConfig,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    queries: int,
    max_query_len: int,
    max_seq_len: int,
) -> ShardTables:
    """Made with operations on the device only.

    Args:
        seq_lens: int32 [requests], tokens on all ranks, the step's included.
        cu_seqlens_q: int32 [requests + 1], from 0 to ``queries``.
    """
    requests, device = seq_lens.shape[0], seq_lens.device
    new_lens = cu_seqlens_q.diff()
    # Request i begins with block cu_seqlens_q[i] // NEW_BLOCK + i: no two share one, and the host need not know.
    first = cu_seqlens_q[:-1].long() // NEW_BLOCK + torch.arange(requests, device=device)
    row = torch.arange(queries, device=device)
    request = (torch.searchsorted(cu_seqlens_q.long(), row, right=True) - 1).clamp(max=requests - 1)
    inside = row - cu_seqlens_q.long()[request]
    slots = (first[request] + inside // NEW_BLOCK) * NEW_BLOCK + inside % NEW_BLOCK
    blocks = queries // NEW_BLOCK + requests
    columns = torch.arange(-(-max_query_len // NEW_BLOCK), device=device)
    table = (first[:, None] + columns).clamp(max=blocks - 1).to(torch.int32)
    context = sharing.held(seq_lens - new_lens)
    return ShardTables(context, sharing.most_held(max_seq_len), new_lens, slots, table, blocks)


def attend_shards(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    max_query_len: int,
    tables: ShardTables,
    group: Group,
    *,
    codec: Codec,
    layout: PageLayout,
    options: ops.AttendOptions,
    key_offset: Tensor | None,
    query_aware: Tensor | None,
    query_aware_index: Tensor | None,
    raw: bool,
    out: Tensor,
    backend: str | None,
) -> None:
    """Attention over the tokens of all ranks.

    Args:
        query: [queries, heads, dim], this rank's heads; key, value: [queries, num_kv_heads, dim],
        the same on every rank.
        pages, block_table: the tokens that this rank holds.
        key_offset: what this rank subtracts from keys.
        raw: the step's tokens are attended as they are, not through their codes.
        out: [queries, heads, value_dim], written in place.
    """
    rows, num_kv_heads = query.shape[0], pages.shape[1]
    own = page_layout(layout.spec, NEW_BLOCK)
    fresh_pages = pages.new_empty(tables.new_blocks, num_kv_heads, own.page_bytes)
    ops.store_kv(
        key, value, fresh_pages, tables.new_slots, codec=codec, layout=own, key_offset=key_offset,
        query_aware=query_aware,
        query_aware_index=query_aware_index if query_aware is not None and query_aware.ndim == 4 else None,
        backend=backend,
    )  # fmt: skip
    new = ops.attend(
        query, fresh_pages, tables.new_table, tables.new_lens, cu_seqlens_q, codec=codec, layout=own,
        max_query_len=max_query_len, max_seq_len=max_query_len, key_offset=key_offset, options=options,
        fresh=(key, value) if raw else None, out=query.new_empty(*out.shape, dtype=torch.float32), return_lse=True,
        backend=backend,
    )  # fmt: skip
    everyone = group.all_gather(query.contiguous(), 1)
    context = ops.attend(
        everyone, pages, block_table, tables.context_lens, cu_seqlens_q, codec=codec, layout=layout,
        max_query_len=max_query_len,
        max_seq_len=min(tables.max_context_len, block_table.shape[1] * layout.block_size),
        key_offset=key_offset, options=replace(options, causal=False),
        out=query.new_empty(rows, everyone.shape[1], layout.spec.value_dim, dtype=torch.float32), return_lse=True,
        backend=backend,
    )  # fmt: skip
    assert isinstance(new, tuple)
    assert isinstance(context, tuple)
    out.copy_(merge_attention_states(new, combined(*context, group)))


def combined(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Every rank's results for all heads, float32 [queries, all heads, dim] and [queries, all heads] -> this rank's."""
    total = torch.logsumexp(group.all_gather(lse[None].contiguous(), 0), 0)
    weight = torch.where(total == -torch.inf, 0.0, torch.exp(lse - total))
    mine = group.reduce_scatter((out * weight[..., None]).contiguous(), 1)
    heads = mine.shape[1]
    return mine, total[:, group.rank_in_group * heads :][:, :heads]
