"""Plan once, run many times: for calls that differ only in a few addresses between steps, as in decoding.

``plan_attend`` and ``plan_store`` check and prepare a call. ``run`` then repeats it with other queries and lengths, or
other vectors and slots, of the same shapes. The owner of a plan calls ``fits`` before a step that may differ, and makes
a new plan if it does. A plan points to the pages it was made for: drop it when they move. It holds the arguments of its
last run, so one thread at a time may run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimkv.arguments import describe, typed
from slimkv.errors import InputError
from slimkv.ops.attention.api import REGISTRY as ATTENTION
from slimkv.ops.attention.api import AttendOptions, checked_request
from slimkv.ops.batch import AttentionBatch, PackedKV, Rounding
from slimkv.ops.store.api import REGISTRY as STORE
from slimkv.ops.store.api import checked_request as checked_store

Launch = Callable[..., None]  # the result of a backend's ``plan(request)``


_Like = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, int]


def _like(name: str, x: Tensor | None) -> _Like | None:
    """The properties of ``x`` on which a prepared launch depends; for floats they include the alignment."""
    if x is None:
        return None
    try:
        dtype = x.dtype
        return dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15 if dtype.is_floating_point else 0
    except (AttributeError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor with memory of its own, not {describe(x)}") from error


def _say(like: _Like | None) -> str:
    if like is None:
        return "none"
    dtype, shape, strides, device, beyond = like
    return f"{dtype} {list(shape)} with strides {list(strides)} on {device}, {beyond} bytes beyond a multiple of 16"


class _Plan:
    """A prepared launch for the same objects ``kept`` and for tensors like ``inputs``, which it does not keep."""

    def __init__(self, kept: tuple[object, ...], launch: Launch, **inputs: Tensor | None) -> None:
        self._kept, self._ids, self._launch = kept, tuple(map(id, kept)), launch
        self._inputs = {name: _like(name, x) for name, x in inputs.items()}
        self._shapes = {name: x.shape for name, x in inputs.items() if x is not None}

    def _fits(self, *kept: object, **inputs: Tensor | None) -> bool:
        same = self._ids == tuple(map(id, kept))
        return same and all(self._inputs[name] == _like(name, x) for name, x in inputs.items())

    def _check(self, **inputs: Tensor | None) -> None:
        for name, x in inputs.items():
            wanted, found = self._inputs[name], _like(name, x)
            if wanted != found:
                raise InputError(f"the plan takes {name} like {_say(wanted)}, not {_say(found)}")


class AttendPlan(_Plan):
    """A prepared ``attend`` without fresh K and V; queries, output and lengths may change between runs."""

    def fits(self, query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None) -> bool:
        """Whether ``run`` accepts ``query``; pages, tables and options must be the objects of the plan."""
        return self._fits(kv.pages, batch.block_table, batch.cu_seqlens_q, options, query=query)

    def run(self, query: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
        """query [total_queries, num_heads, key_dim], seq_lens int32 [sequences] -> out; see ``attend``.

        Lengths may reach the capacity of the block table. ``out``: contiguous, of the query's dtype; allocated if None.
        """
        self._check(query=query, seq_lens=seq_lens)
        if out is None:
            out = query.new_empty(self._shapes["out"])
        else:
            self._check(out=out)
        self._launch(query, out, seq_lens)
        return out


class StorePlan(_Plan):
    """A prepared ``store_kv``; keys, values, slots and the index of the rounding may change between runs."""

    def fits(
        self, key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None
    ) -> bool:
        """Whether ``run`` accepts these vectors; pages, offset and matrices must be the objects of the plan."""
        matrices, index = (None, None) if rounding is None else (rounding.matrices, rounding.index)
        kept = kv.pages, kv.key_offset, matrices
        return self._fits(*kept, key=key, value=value, slot_mapping=slot_mapping, index=index)

    def run(self, key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None = None) -> None:
        """key, value [tokens, num_kv_heads, dim], slot_mapping and the rounding's index [tokens]: see ``store_kv``."""
        self._check(key=key, value=value, slot_mapping=slot_mapping, index=index)
        self._launch(key, value, slot_mapping, index)


@typed
def plan_attend(
    query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None = None, *,
    backend: str | None = None,
) -> AttendPlan:  # fmt: skip
    """Prepares, but does not run, ``attend`` for queries like these and lengths up to what the block table holds."""
    table = batch.block_table
    if table.ndim != 2:
        raise InputError(f"block_table must be int32 with 2 axes, not {describe(table)}")
    longest = replace(batch, max_seq_len=table.shape[1] * kv.layout.block_size)
    request = checked_request(query, kv, longest, options)
    module = ATTENTION.select(request.pages.device, request, backend).load()
    nothing = batch.seq_lens[:0]
    kept = replace(request, query=nothing, out=nothing, seq_lens=nothing)  # a plan keeps no tensors of a step

    def launch(query: Tensor, out: Tensor, seq_lens: Tensor) -> None:
        replace(kept, query=query, out=out, seq_lens=seq_lens).run(module)

    prepared = None if request.sees_offset else _prepared(module, request)
    kept_objects = (kv.pages, table, batch.cu_seqlens_q, options)
    return AttendPlan(kept_objects, prepared or launch, query=query, seq_lens=request.seq_lens, out=request.out)


@typed
def plan_store(
    key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None, *,
    backend: str | None = None,
) -> StorePlan:  # fmt: skip
    """Prepares, but does not run, ``store_kv`` for vectors like these."""
    request = checked_store(key, value, kv, slot_mapping, rounding)
    module = STORE.select(request.pages.device, request, backend).load()
    nothing = slot_mapping[:0]
    kept = replace(request, key=nothing, value=nothing, slot_mapping=nothing, query_aware_index=None)

    def launch(key: Tensor, value: Tensor, slot_mapping: Tensor, index: Tensor | None) -> None:
        replace(kept, key=key, value=value, slot_mapping=slot_mapping, query_aware_index=index).run(module)

    prepared = (_prepared(module, request) if request.centred_by(module) else None) or launch
    index, kept_objects = request.query_aware_index, (kv.pages, kv.key_offset, request.query_aware)
    return StorePlan(kept_objects, prepared, key=key, value=value, slot_mapping=slot_mapping, index=index)


def _prepared(module: Any, request: Any) -> Launch | None:
    """The backend's prepared launch; None if it cannot prepare this request."""
    plan = getattr(module, "plan", None)
    return plan(request) if plan is not None else None
