"""Plan once, run many times: for calls in which only a few addresses change between steps, as in decoding.

``plan_attend`` and ``plan_store`` check and prepare a call. ``run`` then repeats it with other queries and lengths, or
other vectors and slots, of the same shapes. The owner of a plan calls ``fits`` before a step that may differ, and makes
a new plan if it does. A plan points to the pages it was made for: drop it when they move. It holds the arguments of its
last run, so one thread at a time may run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
Geometry = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


def _geometry(x: Tensor) -> Geometry:
    """The properties that a prepared launch depends on, besides the address, whose alignment must not change."""
    try:
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
    except (AttributeError, RuntimeError) as error:
        raise InputError(f"a plan takes tensors with memory of their own, not {describe(x)}") from error


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, not {describe(x)}")


def _say(geometry: Geometry) -> str:
    shape, strides, dtype, device, _ = geometry
    return f"{dtype} {list(shape)} with strides {list(strides)} on {device}"


@dataclass(frozen=True)
class AttendPlan:
    """An ``attend`` without fresh K and V in which queries, output and lengths may change."""

    pages: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    options: AttendOptions | None
    _query: Geometry
    _out: Geometry
    _launch: Launch

    def fits(self, query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None) -> bool:
        """Whether ``run`` may take ``query`` for these pages and tables, which must be the very same objects."""
        return (
            self.pages is kv.pages
            and self.block_table is batch.block_table
            and self.cu_seqlens_q is batch.cu_seqlens_q
            and self.options is options
            and self._query == _geometry(query)
        )

    def run(self, query: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
        """query [total_queries, num_heads, key_dim], seq_lens int32 [sequences] -> out, as ``attend`` gives it.

        Lengths may be as long as the block table. ``out``: contiguous, of the query's dtype; allocated when None.
        """
        _check_tensor("seq_lens", seq_lens)
        if self._query != _geometry(query):
            raise InputError(f"the plan is for queries like {_say(self._query)}, not {_say(_geometry(query))}")
        check_int32("seq_lens", seq_lens, self.block_table.shape[:1], self.block_table.device)
        if out is None:
            out = query.new_empty(self._out[0])
        elif self._out != _geometry(out):
            raise InputError(f"the plan writes outputs like {_say(self._out)}, not {_say(_geometry(out))}")
        self._launch(query, out, seq_lens)
        return out


@dataclass(frozen=True)
class StorePlan:
    """A ``store_kv`` in which keys, values, slots and the index of the rounding may change."""

    pages: Tensor
    key_offset: Tensor | None
    matrices: Tensor | None
    _key: Geometry
    _value: Geometry
    _slots: torch.dtype
    _indexed: bool
    _launch: Launch

    def fits(
        self, key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None
    ) -> bool:
        """Whether ``run`` may take these vectors for the very same pages, offset and matrices."""
        matrices, index = (None, None) if rounding is None else (rounding.matrices, rounding.index)
        same = self.pages is kv.pages and self.key_offset is kv.key_offset and self.matrices is matrices
        return same and self._takes(key, value, slot_mapping, index)

    def run(self, key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None = None) -> None:
        """key, value [tokens, num_kv_heads, dim], slot_mapping and the rounding's index [tokens]: see ``store_kv``."""
        _check_tensor("slot_mapping", slot_mapping)
        if index is not None:
            _check_tensor("index", index)
        if not self._takes(key, value, slot_mapping, index):
            wanted = "an int32" if self._indexed else "no"
            raise InputError(
                f"the plan stores keys like {_say(self._key)} and values like {_say(self._value)} with {self._slots} "
                f"slots and {wanted} index, not {_say(_geometry(key))} and {_say(_geometry(value))} with "
                f"{slot_mapping.dtype}"
            )
        self._launch(key, value, slot_mapping, index)

    def _takes(self, key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None) -> bool:
        if self._key != _geometry(key) or self._value != _geometry(value):
            return False
        tokens, device = key.shape[:1], key.device
        if (slot_mapping.shape, slot_mapping.dtype, slot_mapping.device) != (tokens, self._slots, device):
            return False
        if index is None or not self._indexed:
            return index is None and not self._indexed
        return (index.shape, index.dtype, index.device) == (tokens, torch.int32, device)


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
    return AttendPlan(
        kv.pages, table, batch.cu_seqlens_q, options, _geometry(query), _geometry(request.out), prepared or launch
    )


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
    return StorePlan(
        kv.pages, kv.key_offset, request.query_aware, _geometry(key), _geometry(value), slot_mapping.dtype,
        request.query_aware_index is not None, prepared,
    )  # fmt: skip


def _prepared(module: Any, request: Any) -> Launch | None:
    """The backend's prepared launch; None if it does not prepare launches."""
    plan = getattr(module, "plan", None)
    return plan(request) if plan is not None else None
