"""Prefill of latent attention: new tokens attend to one another and, in chunks, to the cached tokens of their prompts.

The layer's own projection expands latents into K and V of every head, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.integrations.sglang.metadata import Step, starts_of

Lengths = tuple[Tensor, int]  # cumulative lengths, int32 [requests + 1], and the largest length


@dataclass(frozen=True)
class Chunk:
    """Cached tokens, of all requests, that are expanded together."""

    slots: Tensor  # int64 [tokens], request by request
    keys: Lengths


@dataclass(frozen=True)
class Prefill:
    """The plan of a prefill step, shared by its layers."""

    queries: Lengths
    chunks: tuple[Chunk, ...]


def plan_prefill(new: list[int], cached: list[int], step: Step, page_size: int, capacity: int) -> Prefill:
    """Plans a step from the numbers of ``new`` and ``cached`` tokens; a chunk has about ``capacity`` tokens at most."""
    device = step.block_table.device
    share = max(page_size, capacity // max(1, len(cached)) // page_size * page_size)  # tokens per request in a chunk
    chunks = []
    for first in range(0, max(cached, default=0), share):
        lengths = [min(max(count - first, 0), share) for count in cached]
        starts = starts_of(lengths, device)
        total = sum(lengths)
        request = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), starts.diff().long(), output_size=total
        )
        position = torch.arange(total, device=device) - starts[request] + first
        slots = step.block_table[request, position // page_size].long() * page_size + position % page_size
        chunks.append(Chunk(slots, (starts, max(lengths))))
    return Prefill((starts_of(new, device), max(new)), tuple(chunks))


def attend_prefill(
    query: Tensor, fresh: tuple[Tensor, Tensor], prefill: Prefill, expand: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: float, flash: Callable[..., Any] | None = None,
) -> Tensor:  # fmt: skip
    """Attention of query [tokens, heads, dim] to ``fresh`` K and V and cached tokens -> [tokens, heads, value_dim].

    ``expand``: returns K and V of cached slots. ``flash``: FlashAttention's function; None: plain torch.
    """
    attend = _torch_attention if flash is None else partial(_flash_attention, flash)
    out, lse = attend(query, *fresh, prefill.queries, prefill.queries, scale, causal=True)
    for chunk in prefill.chunks:
        more, more_lse = attend(query, *expand(chunk.slots), prefill.queries, chunk.keys, scale, causal=False)
        out = ops.merge_attention_states((out, lse), (more, more_lse)).to(query.dtype)
        lse = torch.logaddexp(lse, more_lse)
    return out


def _flash_attention(
    flash: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, queries: Lengths, keys: Lengths, scale: float,
    *, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output [tokens, heads, value_dim] and log-sum-exp [tokens, heads]."""
    out, lse, *_ = flash(
        q=query, k=key, v=value, cu_seqlens_q=queries[0], cu_seqlens_k=keys[0], max_seqlen_q=queries[1],
        max_seqlen_k=keys[1], softmax_scale=scale, causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse.T


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Lengths, keys: Lengths, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """``_flash_attention`` in plain torch and float32, for CPUs."""
    out = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float32)
    lse = torch.full(query.shape[:2], -torch.inf)
    ends_q, ends_k = queries[0].tolist(), keys[0].tolist()
    for i in range(len(ends_q) - 1):
        rows, of = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        if of.start == of.stop or rows.start == rows.stop:
            continue
        scores = torch.einsum("qhd,khd->qhk", query[rows].float(), key[of].float()) * scale
        if causal:
            hidden = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), value[of].float())
    return out, lse
