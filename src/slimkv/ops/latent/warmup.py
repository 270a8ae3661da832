"""Runs steps of latent attention on a scratch page, so that kernels are compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from slimkv.codec import Codec
from slimkv.ops.batch import PackedKV
from slimkv.ops.latent.api import attend_latent
from slimkv.ops.latent.tokens import gather_latent, store_latent
from slimkv.ops.warmup import Step, start_loading_steps
from slimkv.spec import PageLayout

_seen: set[tuple[object, ...]] = set()


@dataclass(frozen=True, eq=False)
class LatentKind:
    """The properties of a layer that select its kernels."""

    codec: Codec
    layout: PageLayout
    num_heads: int
    softmax_scale: float
    dtype: torch.dtype
    backend: str | None


def run_latent_steps(kind: LatentKind, steps: Iterable[Step]) -> int:
    """Stores, gathers and attends to latents, once per process and kind of layer; returns the number of steps it ran.

    CUDA kernels are compiled in parallel.
    """
    signature = (kind.layout, kind.num_heads, kind.dtype, kind.codec.device, kind.backend)
    if signature in _seen:
        return 0
    _seen.add(signature)
    steps = list(steps)
    start_loading_steps(partial(_run, kind), steps, kind.codec.device)
    for step in steps:
        _run(kind, step)
    return len(steps)


def _run(kind: LatentKind, step: Step) -> None:
    codec, layout, device = kind.codec, kind.layout, kind.codec.device
    kv = PackedKV(torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device), codec, layout)
    rows = step.sequences * step.queries
    dims = codec.spec.key_dim, codec.spec.value_dim
    latent, rope = (torch.ones(rows, dim, dtype=kind.dtype, device=device) for dim in dims)
    slots = torch.arange(rows, device=device) % layout.block_size
    store_latent(latent, rope, kv, slots, backend=kind.backend)
    if not layout.token_rows:  # token rows are never expanded
        gather_latent(kv, slots, dtype=kind.dtype)
    width = step.max_seq_len if layout.token_rows else layout.blocks_for(step.max_seq_len)
    query, query_rope = (x[:, None].repeat(1, kind.num_heads, 1) for x in (latent, rope))
    attend_latent(
        query, query_rope, kv, step.batch(width, device), softmax_scale=kind.softmax_scale, query_is_rotated=True,
        output_is_rotated=True, backend=kind.backend,
    )  # fmt: skip
