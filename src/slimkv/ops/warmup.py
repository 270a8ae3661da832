"""Compiles kernels before the first request, in threads, and runs steps on a scratch page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendOptions, attend
from slimkv.ops.attention.cuda.decode import start_loading_reachable
from slimkv.ops.batch import AttentionBatch, PackedKV, Rounding
from slimkv.ops.cuda import cuda_unavailable_reason
from slimkv.ops.cuda.module import only_loading
from slimkv.ops.store.api import store_kv
from slimkv.spec import PageLayout

_SHORT = 128  # tokens; short sequences may use other kernels
_FEW = (2, 4, 8)  # new tokens of a prompt whose prefix is cached


@dataclass(frozen=True, eq=False)
class LayerKind:
    """The properties of a layer that select its kernels."""

    codec: Codec
    layout: PageLayout
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    options: AttendOptions
    key_offset: Tensor | None = None
    query_aware: Tensor | None = None
    backend: str | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for layers that run the same kernels."""
        options, matrices = self.options, self.query_aware
        return (
            self.layout, self.num_heads, self.num_kv_heads, self.dtype, options.sliding_window, options.softcap > 0,
            options.sinks is None, options.prefill, options.deterministic, self.key_offset is None,
            None if matrices is None else matrices.ndim, self.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Sequences with this many new tokens each, in tables for ``max_seq_len`` tokens."""

    sequences: int
    queries: int
    max_seq_len: int

    def batch(self, entries: int, device: torch.device) -> AttentionBatch:
        """The tables, with ``entries`` per sequence; all tokens are in block 0."""
        table = torch.zeros(self.sequences, entries, dtype=torch.int32, device=device)
        lengths = torch.full((self.sequences,), self.queries, dtype=torch.int32, device=device)
        starts = torch.arange(self.sequences + 1, dtype=torch.int32, device=device) * self.queries
        return AttentionBatch(table, lengths, starts, self.queries, self.max_seq_len)


def decoding_steps(max_seq_len: int, verified: int = 1) -> list[Step]:
    """Decode steps, and verification of ``verified`` tokens, in short and long sequences."""
    short = min(max_seq_len, max(_SHORT, verified))
    return [Step(2, queries, length) for queries in sorted({1, verified}) for length in sorted({max_seq_len, short})]


def serving_steps(max_seq_len: int, verified: int = 1) -> list[Step]:
    """One step of each kind that an engine runs besides its largest prefill.

    These are decode steps, prompts with all but a few tokens cached, and chunks of a few dozen tokens.
    """
    cached = [Step(2, min(queries, max_seq_len), max_seq_len) for queries in (*_FEW, MAX_DECODE_QUERIES + 1)]
    return list(dict.fromkeys([*decoding_steps(max_seq_len, verified), *cached]))


def start_loading_steps(run: Callable[[Step], None], steps: Iterable[Step], device: torch.device) -> bool:
    """Starts to compile, in threads, the CUDA kernels of ``run(step)`` for all steps; False without CUDA."""
    if cuda_unavailable_reason(device) is not None:
        return False
    with only_loading():
        for step in steps:
            run(step)
    return True


def start_compiling(kind: LayerKind, steps: Iterable[Step]) -> list[Future[Any]]:
    """Starts to compile, in threads, all kernels of these steps and all that ``attend`` can use; returns at once."""
    if not start_loading_steps(partial(_run, kind), steps, kind.codec.device) or kind.backend not in (None, "cuda"):
        return []
    group = kind.num_heads // kind.num_kv_heads
    return start_loading_reachable(kind.layout, group, kind.dtype, kind.options, kind.codec.device)


def run_steps(kind: LayerKind, steps: Iterable[Step]) -> None:
    """Compiles the kernels of ``start_compiling`` in parallel, then runs store and attention for each step."""
    steps = list(steps)
    reachable = start_compiling(kind, steps)
    for step in steps:
        _run(kind, step)
    for kernel in reachable:
        kernel.result()


def _run(kind: LayerKind, step: Step) -> None:
    codec, layout, device = kind.codec, kind.layout, kind.codec.device
    tokens, spec = step.sequences * step.queries, codec.spec

    def ones(heads: int, dim: int) -> Tensor:
        return torch.ones(tokens, heads, dim, dtype=kind.dtype, device=device)

    pages = torch.zeros(1, kind.num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
    kv, rounding = PackedKV(pages, codec, layout, kind.key_offset), None
    if kind.query_aware is not None:
        several = kind.query_aware.ndim == 4
        ranges = torch.zeros(tokens, dtype=torch.int32, device=device) if several else None
        rounding = Rounding(kind.query_aware, ranges)
    store_kv(
        ones(kind.num_kv_heads, spec.key_dim), ones(kind.num_kv_heads, spec.value_dim), kv,
        torch.arange(tokens, device=device) % layout.block_size, rounding, backend=kind.backend,
    )  # fmt: skip
    batch = step.batch(layout.blocks_for(step.max_seq_len), device)
    attend(ones(kind.num_heads, spec.key_dim), kv, batch, kind.options, backend=kind.backend)
