"""A full-attention layer that keeps its first and last tokens unquantised and packs the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.integrations.transformers.decoded_attention import dense_attention
from slimkv.integrations.transformers.layers import RAW_FRESH_ABOVE, LayerSettings, PackedLayer, check_no_grad
from slimkv.integrations.transformers.lazy_kv import PackedStates, PagedKV, packed_pair, token_rows
from slimkv.ops.attention.api import SIXTEEN_BIT
from slimkv.ops.merge import merge_attention_states

Pair = tuple[Tensor, Tensor]


@dataclass
class SinkRecentKV:
    """First tokens raw, then packed ones, then last tokens raw."""

    head: Pair  # K, V [batch, num_kv_heads, tokens, dim]
    middle: PagedKV
    tail: Pair
    new: int = 0  # of these tokens, the last ones

    first = 0
    window = None
    prefill = SIXTEEN_BIT
    deterministic = False

    @property
    def positions(self) -> int:
        """See ``LazyKV``."""
        return self.shape[2]

    @property
    def pads(self) -> list[int]:
        """See ``LazyKV``."""
        return self.middle.pads

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, KV heads, positions."""
        batch, heads, _ = self.middle.shape
        return batch, heads, self.head[0].shape[2] + self.middle.positions + self.tail[0].shape[2]

    def dense(self) -> Pair:
        """See ``LazyKV``."""
        parts = zip(self.head, self.middle.dense(), self.tail, strict=True)
        key, value = (torch.cat(part, 2) for part in parts)
        return key, value

    def refusal(self, pads: list[int] | None) -> str | None:
        """See ``LazyKV``."""
        return (
            "padding beside a high-precision window is masked on decoded keys and values"
            if pads and any(pads)
            else None
        )

    def attend(self, query: Tensor, options: ops.AttendOptions, pads: list[int] | None) -> Tensor:
        """The packed part fused, the raw parts dense, joined by their log-sum-exps."""
        raw_key, raw_value = (torch.cat(part, 2) for part in zip(self.head, self.tail, strict=True))
        positions, new, head = self.middle.positions, query.shape[2], self.head[0].shape[2]
        mask = None
        if new > 1:  # a single query is at the end and sees everything
            position = torch.arange(raw_key.shape[2], device=query.device)
            position = torch.where(position < head, position, position + positions)
            asking = torch.arange(new, device=query.device) + self.shape[2] - new
            mask = (position[None, :] <= asking[:, None])[None, None]
        out, lse = dense_attention(
            query, raw_key, raw_value, mask, scale=options.softmax_scale, softcap=options.softcap, sinks=options.sinks
        )
        if positions == 0:
            return out
        middle, batch = self.middle, query.shape[0]
        step = middle.step.batch
        starts = middle.tables.cu_seqlens_q(new)
        # Every packed key is older than every query, so no causal order is left inside the packed part.
        plain = ops.AttendOptions(softmax_scale=options.softmax_scale, causal=False, softcap=options.softcap)
        rows = token_rows(query)
        packed_lse = rows.new_empty(rows.shape[:2], dtype=torch.float32)
        asked = replace(step, cu_seqlens_q=starts, max_query_len=new, min_query_len=new)
        packed_out = ops.attend(rows, middle.kv, asked, plain, lse=packed_lse, backend=middle.backend)
        packed = packed_out.unflatten(0, (batch, new)), packed_lse.unflatten(0, (batch, new))
        return merge_attention_states((out, lse), packed).to(query.dtype)


class SinkRecentLayer(PackedLayer):
    """The first ``sink_tokens`` and last ``recent_tokens`` in the model's dtype, the rest packed."""

    partly = True

    def __init__(self, format: str, settings: LayerSettings, number: int = 0) -> None:
        super().__init__(format, settings, number)
        self.sink_tokens, self.recent_tokens = settings.config.sink_tokens, settings.config.recent_tokens

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, packed and raw."""
        if not self.is_initialized:
            return 0
        return super().nbytes + sum(x.numel() * x.element_size() for x in (*self._head, *self._tail))

    @property
    def packed_tokens(self) -> int:
        """The number of tokens in pages."""
        return self.tokens - self._head[0].shape[2] - self._tail[0].shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PackedLayer``."""
        super().lazy_initialization(key_states, value_states)
        self._head: Pair = (key_states[:, :, :0].clone(), value_states[:, :, :0].clone())
        self._tail: Pair = self._head

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """See ``PackedLayer``; tokens that leave the window are packed at once."""
        check_no_grad(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        new, past = key_states.shape[2], self.tokens
        raw = new > RAW_FRESH_ABOVE
        before = self._head, self._tail, self.packed_tokens
        head, pending = self._head, _join(self._tail, (key_states, value_states))
        if (room := self.sink_tokens - head[0].shape[2]) > 0 and before[2] == 0:
            head, pending = _join(head, _cut(pending, 0, room)), _cut(pending, room, None)
        leaving = max(pending[0].shape[2] - self.recent_tokens, 0)
        step = self.tables.advance(before[2], leaving, needs_past=True)
        if leaving:
            self._store(*_cut(pending, 0, leaving), step, head[0].shape[2] + before[2])
        self._head, self._tail = head, _cut(pending, leaving, None, copy=True)
        self.tokens += new
        if raw and past == 0:
            return key_states, value_states
        if raw:  # this pass reads the window as it was, and its own tokens raw
            head, tail, packed = before[0], _join(before[1], (key_states, value_states)), before[2]
        else:
            head, tail, packed = self._head, self._tail, self.packed_tokens
        kv = SinkRecentKV(head, self._middle(packed), tail, new)
        return packed_pair(kv, self.pool.layout, self.dtype, self.device)

    def _middle(self, packed: int) -> PagedKV:
        step = self.tables.prefix(packed)
        return PagedKV(
            self.pool.kv, self.tables, step, 0, packed,
            self.dtype, None, False, None, self.settings.config.backend, self.attend_codes, SIXTEEN_BIT,
        )  # fmt: skip

    def _view(self, side: int) -> PackedStates | None:
        if not self.is_initialized or self.tokens == 0:
            return None
        kv = SinkRecentKV(self._head, self._middle(self.packed_tokens), self._tail)
        return packed_pair(kv, self.pool.layout, self.dtype, self.device)[side]

    def reset(self) -> None:
        """See ``PackedLayer``."""
        if self.is_initialized:
            del self._head, self._tail
        super().reset()

    def packed_to_remove(self, tokens: int) -> int:
        """The number of packed tokens to remove if ``tokens`` are removed."""
        return min(max(tokens - self._tail[0].shape[2], 0), self.packed_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes recent tokens first, then packed ones (the window then refills with new tokens), then sinks."""
        if not self.is_initialized:
            return
        tokens = min(-tokens_to_remove, self.tokens)
        from_tail = min(tokens, self._tail[0].shape[2])
        # The tables have cropped the packed tokens; the rest is removed from the first ones.
        held = self.tables.tokens
        self._tail = _cut(self._tail, 0, self._tail[0].shape[2] - from_tail)
        self.tokens -= tokens
        self._head = _cut(self._head, 0, self.tokens - held - self._tail[0].shape[2])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The raw tokens; the tables move the pages."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See ``reorder_cache``."""
        if self.is_initialized:
            self._head = tuple(x.repeat_interleave(repeats, 0) for x in self._head)  # type: ignore[assignment]
            self._tail = tuple(x.repeat_interleave(repeats, 0) for x in self._tail)  # type: ignore[assignment]

    def batch_select_indices(self, indices: Tensor) -> None:
        """See ``reorder_cache``."""
        if self.is_initialized:
            self._head = tuple(x[indices.to(x.device)] for x in self._head)  # type: ignore[assignment]
            self._tail = tuple(x[indices.to(x.device)] for x in self._tail)  # type: ignore[assignment]


def _join(a: Pair, b: Pair) -> Pair:
    return torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)


def _cut(pair: Pair, start: int, end: int | None, copy: bool = False) -> Pair:
    key, value = (x[:, :, start:end] for x in pair)
    return (key.clone(), value.clone()) if copy else (key, value)
