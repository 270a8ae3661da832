"""A full-attention layer in tiers: raw first tokens (head), packed tokens by age, raw last tokens (tail)."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from slimkv.integrations.transformers.ladder import Drop, Ladder, costs_of, tier_formats
from slimkv.integrations.transformers.layer_settings import LayerSettings
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.lazy_kv import PagedKV
from slimkv.integrations.transformers.tables import Step
from slimkv.integrations.transformers.tiered_kv import Pair, TieredKV
from slimkv.spec import page_layout


class Tier(PackedLayer):
    """The pages of one tier of a layer."""

    def __init__(self, format: str, settings: LayerSettings, number: int, tier: int) -> None:
        super().__init__(format, settings, number)
        self.tier = tier

    def fit(self, dropped: int = 0) -> None:
        """Resizes the pages to the tables, without the first ``dropped`` rows of blocks."""
        have, skip = self.pool.pages.shape[0], dropped * self.tables.batch
        blocks = self.tables.blocks
        if dropped or blocks != have:
            kept = torch.arange(skip, min(have, skip + blocks), device=self.device)
            self.relocate(kept, kept - skip, blocks)

    def store(self, key: Tensor, value: Tensor, step: Step, first: int) -> None:
        """Stores K and V [batch, num_kv_heads, tokens, dim] from position ``first`` on in the slots of ``step``."""
        self.fit()
        self._store(key, value, step, first)

    def kv(self, tokens: int) -> PagedKV:
        """The first ``tokens`` tokens of the tier."""
        return self._paged(self.tables.prefix(tokens), 0, tokens)


class TieredLayer(PackedLayer):
    """Stores the first ``sink_tokens`` and last ``recent_tokens`` raw (head and tail), the rest in tiers of pages."""

    def __init__(self, format: str, settings: LayerSettings, number: int = 0) -> None:
        super().__init__(format, settings, number)
        formats = tier_formats(settings.config, format)
        self.finest, self.format = format, format if len(formats) == 1 else f"{format} to {formats[0]}"

    @property
    def ladder(self) -> Ladder:
        """The ladder of the cache, which assigns each token to a tier."""
        return self.settings.tables.ladder

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, packed and raw."""
        if not self.is_initialized:
            return 0
        raw = sum(x.numel() * x.element_size() for x in (*self._head, *self._tail))
        return raw + sum(tier.nbytes for tier in self.tiers)

    @property
    def tail_tokens(self) -> int:
        """The number of raw last tokens."""
        return self._tail[0].shape[2]

    @property
    def raw_tokens(self) -> int:
        """The number of raw tokens."""
        return self._head[0].shape[2] + self.tail_tokens if self.is_initialized else 0

    @property
    def packed_tokens(self) -> int:
        """The number of tokens in pages."""
        return self.tokens - self.raw_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PackedLayer``. Allocates pages for the newest tier; other tiers get them with their first token."""
        settings, ladder = self.settings, self.ladder
        formats = tier_formats(settings.config, self.finest, key_states.element_size())
        tiers = [Tier(name, settings, self.number, i) for i, name in enumerate(formats)]
        layouts = [page_layout(tier._spec(key_states, value_states), settings.block_size) for tier in tiers]
        batch, heads, _, dim = key_states.shape
        raw = heads * (dim + value_states.shape[-1]) * key_states.element_size()
        ladder.start(
            formats, lambda i: settings.tables.get(batch, key_states.device, None, i),
            costs_of(layouts, heads, ladder.layers, raw),
        )  # fmt: skip
        self.tiers, self._like = tiers, (key_states[:, :, :0].clone(), value_states[:, :, :0].clone())
        self._head = self._tail = self._like
        newest = self._tier(len(tiers) - 1)
        self.dtype, self.device, self.num_kv_heads = newest.dtype, newest.device, newest.num_kv_heads
        self.pool, self.tables, self._plan = newest.pool, newest.tables, None
        ladder.members.append(self)
        self.is_initialized = True

    def _tier(self, number: int) -> Tier:
        if not (tier := self.tiers[number]).is_initialized:
            tier.lazy_initialization(*self._like)
        return tier

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """See ``PackedLayer``; tokens that leave the raw tail are packed at once."""
        self._prepare(key_states, value_states)
        new, past, packed = key_states.shape[2], self.tokens, self.packed_tokens
        raw = self.settings.attends_raw(new)
        before = self._head, self._tail
        head, pending = self._head, _join(self._tail, (key_states, value_states))
        if (room := self.ladder.sink_tokens - head[0].shape[2]) > 0 and packed == 0:
            head, pending = _join(head, _cut(pending, 0, room)), _cut(pending, room, None)
        leaving = max(pending[0].shape[2] - self.settings.config.recent_tokens, 0)
        outside = head[0].shape[2] + pending[0].shape[2] - leaving
        stored = 0
        for number, step in self.ladder.advance(packed, leaving, outside):
            part = _cut(pending, stored, stored + step.new)
            self._tier(number).store(*part, step, head[0].shape[2] + packed + stored)
            stored += step.new
        self._head, self._tail = head, _cut(pending, leaving, None, copy=True)
        self.tokens += new
        if raw and past == 0:
            return key_states, value_states
        if raw:  # this pass reads its own tokens raw
            kv = TieredKV(before[0], self._tiers(packed), before[1], new, (key_states, value_states))
        else:
            kv = TieredKV(self._head, self._tiers(self.packed_tokens), self._tail, new)
        return self._states(kv)

    def demote(self, source: int, target: int, slots: Tensor, step: Step, first: int, drop: Drop) -> None:
        """Re-encodes the first tokens of tier ``source``, in ``slots`` [batch, count], at the end of tier ``target``.

        ``first``: the position of the first of them in all tiers together.
        """
        old, batch = self._tier(source), slots.shape[0]
        pair = old.pool.gather(slots.reshape(-1))
        if drop.moved is not None:
            old.pool.move_tokens(*drop.moved)
        old.fit(drop.rows)
        key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in pair)
        self._tier(target).store(key, value, step, self._head[0].shape[2] + first)

    def _tiers(self, tokens: int) -> list[PagedKV]:
        """The first ``tokens`` packed tokens."""
        counts, left = [], tokens
        for tables in self.ladder.tables:
            counts.append(min(tables.tokens, left))
            left -= counts[-1]
        last = len(counts) - 1
        return [self._tier(i).kv(count) for i, count in enumerate(counts) if count or i == last]

    def _whole(self) -> TieredKV:
        return TieredKV(self._head, self._tiers(self.packed_tokens), self._tail)

    def reset(self) -> None:
        """See ``PackedLayer``."""
        if self.is_initialized:
            del self._head, self._tail, self._like, self.tiers
        super().reset()

    def _each(self, method: str) -> None:
        for tier in self.tiers if self.is_initialized else ():
            getattr(tier, method)()

    offload = partialmethod(_each, "offload")
    prefetch = partialmethod(_each, "prefetch")

    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens from the tail, then packed tokens (the ladder has cropped them), then tokens of the head.

        Tokens that stay packed are not moved back into the tail.
        """
        if not self.is_initialized:
            return
        tokens = min(-tokens_to_remove, self.tokens)
        from_tail = min(tokens, self.tail_tokens)
        self._tail = _cut(self._tail, 0, self.tail_tokens - from_tail)
        self.tokens -= tokens
        self._head = _cut(self._head, 0, self.tokens - self.ladder.tokens - self.tail_tokens)
        for tier in self.tiers:
            if tier.is_initialized:
                tier.fit()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects sequences of the raw tokens; the tables move the pages."""
        if self.is_initialized:
            for name in ("_head", "_tail", "_like"):
                setattr(self, name, tuple(x[indices.to(x.device)] for x in getattr(self, name)))

    reorder_cache = batch_select_indices  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See ``batch_select_indices``."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self._like[0].shape[0]).repeat_interleave(repeats))


def _join(a: Pair, b: Pair) -> Pair:
    return torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)


def _cut(pair: Pair, start: int, end: int | None, copy: bool = False) -> Pair:
    key, value = (x[:, :, start:end] for x in pair)
    return (key.clone(), value.clone()) if copy else (key, value)
