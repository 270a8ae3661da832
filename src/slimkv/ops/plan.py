"""Plan once, run many times: for calls in which only a few addresses change between steps, as in decoding.

``plan_attend`` and ``plan_store`` check and prepare a call. ``run`` then repeats it with other queries and lengths, or
other vectors and slots, of the same shapes. The owner of a plan calls ``fits`` before a step that may differ, and makes
a new plan if it does. A plan points to the pages it was made for: drop it when they move. It holds the arguments of its
last run, so one thread at a time may run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimkv.arguments import describe, typed
from slimkv.errors import InputError
from slimkv.ops.attention.api import REGISTRY as ATTENTION
from slimkv.ops.attention.api import AttendOptions, checked_request
from slimkv.ops.batch import AttentionBatch, PackedKV, Rounding
from slimkv.ops.checks import check_int32
from slimkv.ops.store.api import REGISTRY as STORE
from slimkv.ops.store.api import checked_request as checked_store

Launch = Callable[..., None]  # what a backend's ``plan(request)`` returns, or None if it cannot prepare the request


class _Like(NamedTuple):
    """The properties of a tensor that a prepared launch depends on, besides its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int  # bytes beyond a multiple of 16; of vectors, which are read 16 bytes at a time

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)} on {self.device}"


def _like(name: str, x: Tensor) -> _Like:
    try:
        return _Like(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15 if x.is_floating_point() else 0)
    except (AttributeError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor with memory of its own, not {describe(x)}") from error


def _check_like(what: str, wanted: _Like | None, found: _Like | None) -> None:
    if wanted != found:
        raise InputError(f"the plan {what} like {wanted}, not {found}")


def _are_same(kept: tuple[object, ...], given: tuple[object, ...]) -> bool:
    return all(a is b for a, b in zip(kept, given, strict=True))


@dataclass(frozen=True)
class AttendPlan:
    """An ``attend`` without fresh K and V in which queries, output and lengths may change."""

    pages: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    options: AttendOptions | None
    _query: _Like
    _out: _Like
    _launch: Launch

    def fits(self, query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None) -> bool:
        """Whether ``run`` may take ``query`` for these pages and tables, which must be the very same objects."""
        kept = (self.pages, self.block_table, self.cu_seqlens_q, self.options)
        given = (kv.pages, batch.block_table, batch.cu_seqlens_q, options)
        return _are_same(kept, given) and self._query == _like("query", query)

    def run(self, query: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
        """query [total_queries, num_heads, key_dim], seq_lens int32 [sequences] -> out, as ``attend`` gives it.

        Lengths may be as long as the block table. ``out``: contiguous, of the query's dtype; allocated when None.
        """
        _check_like("is for queries", self._query, _like("query", query))
        _like("seq_lens", seq_lens)
        check_int32("seq_lens", seq_lens, self.block_table.shape[:1], self.block_table.device)
        if out is None:
            out = query.new_empty(self._out.shape)
        _check_like("writes outputs", self._out, _like("out", out))
        self._launch(query, out, seq_lens)
        return out


@dataclass(frozen=True)
class StorePlan:
    """A ``store_kv`` in which keys, values, slots and the index of the rounding may change."""

    pages: Tensor
    key_offset: Tensor | None
    matrices: Tensor | None
    _inputs: tuple[_Like | None, ...]  # key, value, slots, index
    _launch: Launch

    def fits(
        self, key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None
    ) -> bool:
        """Whether ``run`` may take these vectors for the very same pages, offset and matrices."""
        matrices, index = (None, None) if rounding is None else (rounding.matrices, rounding.index)
        same = _are_same((self.pages, self.key_offset, self.matrices), (kv.pages, kv.key_offset, matrices))
        return same and self._inputs == _store_inputs(key, value, slot_mapping, index)

    def run(self, key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None = None) -> None:
        """key, value [tokens, num_kv_heads, dim], slot_mapping and the rounding's index [tokens]: see ``store_kv``."""
        found = _store_inputs(key, value, slot_mapping, index)
        if self._inputs != found:
            for what, wanted, given in zip(("keys", "values", "slots", "an index"), self._inputs, found, strict=True):
                _check_like(f"stores {what}", wanted, given)
        self._launch(key, value, slot_mapping, index)


def _store_inputs(key: Tensor, value: Tensor, slots: Tensor, index: Tensor | None) -> tuple[_Like | None, ...]:
    given = _like("key", key), _like("value", value), _like("slot_mapping", slots)
    return *given, None if index is None else _like("index", index)


@typed
def plan_attend(
    query: Tensor,
    kv: PackedKV,
    batch: AttentionBatch,
    options: AttendOptions | None = None,
    *,
    backend: str | None = None,
) -> AttendPlan:
    """Prepares an ``attend`` for such queries and lengths up to the capacity of the block table, without running it."""
    table = batch.block_table
    if table.ndim != 2:
        raise InputError(f"block_table must be int32 with 2 axes, not {describe(table)}")
    longest = replace(batch, max_seq_len=table.shape[1] * kv.layout.block_size)
    request = checked_request(query, kv, longest, options)
    module = ATTENTION.select(request.pages.device, request, backend).load()
    nothing = batch.seq_lens[:0]
    kept = replace(request, query=nothing, out=nothing, seq_lens=nothing)  # a plan holds no step's tensors

    def launch(query: Tensor, out: Tensor, seq_lens: Tensor) -> None:
        replace(kept, query=query, out=out, seq_lens=seq_lens).run(module)

    prepared = None if request.sees_offset else _prepared(module, request)
    like = _like("query", query), _like("out", request.out)
    return AttendPlan(kv.pages, table, batch.cu_seqlens_q, options, *like, prepared or launch)


@typed
def plan_store(
    key: Tensor,
    value: Tensor,
    kv: PackedKV,
    slot_mapping: Tensor,
    rounding: Rounding | None = None,
    *,
    backend: str | None = None,
) -> StorePlan:
    """Prepares a ``store_kv`` for such vectors without storing."""
    request = checked_store(key, value, kv, slot_mapping, rounding)
    module = STORE.select(request.pages.device, request, backend).load()
    nothing = slot_mapping[:0]
    kept = replace(request, key=nothing, value=nothing, slot_mapping=nothing, query_aware_index=None)

    def launch(key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None) -> None:
        replace(kept, key=key, value=value, slot_mapping=slot_mapping, query_aware_index=index).run(module)

    prepared = (_prepared(module, request) if request.centred_by(module) else None) or launch
    inputs = _store_inputs(key, value, slot_mapping, request.query_aware_index)
    return StorePlan(kv.pages, kv.key_offset, request.query_aware, inputs, prepared)


def _prepared(module: Any, request: Any) -> Launch | None:
    """The backend's prepared launch; None if it does not prepare launches."""
    plan = getattr(module, "plan", None)
    return plan(request) if plan is not None else None
