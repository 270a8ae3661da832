"""The keys and values of a layer in tiers at one step, and attention on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimkv import ops
from slimkv.integrations.transformers.decoded_attention import dense_attention
from slimkv.integrations.transformers.lazy_kv import PagedKV, token_rows
from slimkv.ops.attention.api import SIXTEEN_BIT
from slimkv.ops.merge import merged

Pair = tuple[Tensor, Tensor]
NOTHING = -1e30  # the log-sum-exp of no keys


@dataclass
class TieredKV:
    """Raw first tokens, packed tokens in several formats, and raw last tokens."""

    head: Pair  # K, V [batch, num_kv_heads, tokens, dim]
    tiers: list[PagedKV]  # oldest first; with ``fresh``, without the new tokens
    tail: Pair
    new: int = 0  # the number of last tokens that belong to queries
    fresh: Pair | None = None  # the new tokens, if attention reads them raw; they follow all others

    first = 0
    window = None
    prefill = SIXTEEN_BIT
    deterministic = False

    @property
    def positions(self) -> int:
        """See ``PagedKV``."""
        return self.shape[2]

    @property
    def pads(self) -> list[int]:
        """See ``PagedKV``."""
        return [0] * self.head[0].shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, KV heads, positions."""
        batch, heads = self.head[0].shape[:2]
        raw = sum(pair[0].shape[2] for pair in (self.head, self.tail, self.fresh) if pair is not None)
        return batch, heads, raw + sum(tier.positions for tier in self.tiers)

    def dense(self) -> Pair:
        """See ``PagedKV``."""
        parts = self.head, *(tier.dense() for tier in self.tiers), self.tail, *([self.fresh] if self.fresh else [])
        key, value = (torch.cat(side, 2) for side in zip(*parts, strict=True))
        return key, value

    def attends(self, pads: list[int] | None) -> bool:
        """See ``PagedKV``."""
        return not (pads and any(pads))

    def attend(self, query: Tensor, options: ops.AttendOptions, pads: list[int] | None) -> Tensor:
        """Runs fused attention on each tier and dense attention on the raw tokens, and merges them by log-sum-exp."""
        batch, heads, new, _ = query.shape
        plain = replace(options, causal=False, sinks=None, prefill=SIXTEEN_BIT)
        lse = query.new_full((batch, new, heads), NOTHING, dtype=torch.float32)
        if options.sinks is not None:
            lse = options.sinks.float().expand_as(lse).contiguous()
        out = query.new_zeros(batch, new, heads, self.head[1].shape[-1], dtype=torch.float32)
        for first, end, part in self._parts(query, plain):
            rows = slice(first, end)
            out[:, rows], lse[:, rows] = merged((out[:, rows], lse[:, rows]), part)
        return out.to(query.dtype)

    def _parts(self, query: Tensor, options: ops.AttendOptions) -> Iterator[tuple[int, int, Pair]]:
        """Yields (first query, end, (output [batch, queries, heads, dim], log-sum-exp)) per set of visible keys."""
        new = query.shape[2]
        past = self.positions - new
        if (raw := self.head[0].shape[2] + self.tail[0].shape[2]) > 0:
            yield 0, new, self._raw(query, raw, past, options)
        causal = replace(options, causal=True)
        if self.fresh is not None:
            yield 0, new, self._fresh(query, causal)
        begin = self.head[0].shape[2]
        for tier in self.tiers:
            end = begin + tier.positions
            inside, after = (max(begin - past, 0), max(end - past, 0))  # first query in the tier, first one after it
            if after > inside:
                yield inside, after, _attend(tier, query[:, :, inside:after], causal, tier.step.batch)
            if new > after and tier.positions:
                yield after, new, _attend(tier, query[:, :, after:], options, tier.step.batch)
            begin = end

    def _raw(self, query: Tensor, raw: int, past: int, options: ops.AttendOptions) -> Pair:
        key, value = (torch.cat(part, 2) for part in zip(self.head, self.tail, strict=True))
        new, head, mask = query.shape[2], self.head[0].shape[2], None
        if new > 1:  # a single query is last and sees everything
            position = torch.arange(raw, device=query.device)
            packed = sum(tier.positions for tier in self.tiers)
            position = torch.where(position < head, position, position + packed)
            mask = (position[None, :] <= torch.arange(past, past + new, device=query.device)[:, None])[None, None]
        return dense_attention(query, key, value, mask, scale=options.softmax_scale, softcap=options.softcap)

    def _fresh(self, query: Tensor, options: ops.AttendOptions) -> Pair:
        assert self.fresh is not None
        batch, new = query.shape[0], query.shape[2]
        tier = max(self.tiers, key=lambda x: x.kv.pages.shape[0])  # any tier will do: its pages are not read
        table = torch.zeros(batch, tier.kv.layout.blocks_for(new), dtype=torch.int32, device=query.device)
        lengths = torch.full((batch,), new, dtype=torch.int32, device=query.device)
        step = replace(tier.step.batch, block_table=table, seq_lens=lengths, max_seq_len=new)
        return _attend(tier, query, options, step, (token_rows(self.fresh[0]), token_rows(self.fresh[1])))


def _attend(
    tier: PagedKV, query: Tensor, options: ops.AttendOptions, step: ops.AttentionBatch, fresh: Pair | None = None
) -> Pair:
    """(output [batch, queries, heads, dim], log-sum-exp) of a tier's tokens; if causal, the queries are the last."""
    batch, _, new, _ = query.shape
    asked = replace(step, cu_seqlens_q=tier.tables.cu_seqlens_q(new), max_query_len=new, min_query_len=new)
    rows = token_rows(query)
    lse = rows.new_empty(rows.shape[:2], dtype=torch.float32)
    out = ops.attend(rows, tier.kv, asked, options, fresh=fresh, lse=lse, backend=tier.backend)
    return out.unflatten(0, (batch, new)), lse.unflatten(0, (batch, new))
