"""Queries, keys and values: of a real model, or synthetic with the properties that make real ones hard to quantise.

* a few key channels are many times larger than the rest and carry a constant offset (rotary pairs do this);
* every channel has its own spread, and values have heavy tails (Student's t);
* a few tokens have far larger norms, the first one is an attention sink with a small value;
* queries live near a few directions, so attention is neither flat nor one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import MissingDependencyError

OUTLIER_CHANNELS = 0.04
CHANNEL_GAIN = (4.0, 12.0)
OUTLIER_TOKENS = 0.01
KEY_TOKEN_GAIN = (1.5, 3.0)
VALUE_TOKEN_GAIN = (3.0, 10.0)
TAIL_FREEDOM = 5
QUERY_RANK = 8
SCORE_SPREAD = 1.5
_CAPTURE = "slimkv_capture"


@dataclass(frozen=True)
class AttentionSample:
    """Queries [heads, queries, dim], keys and values [heads, tokens, dim], float32.

    If ``causal``, the queries belong to the last tokens and see none after their own.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False


def student(shape: tuple[int, ...], freedom: int, generator: torch.Generator) -> Tensor:
    """Numbers of Student's t distribution with variance 1, or nearly so."""
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((*shape, freedom), generator=generator).square().mean(-1)
    return normal / chi.sqrt() * math.sqrt((freedom - 2) / freedom)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _pick(heads: int, size: int, share: float, generator: torch.Generator) -> Tensor:
    """bool [heads, size] with at least one True in each row."""
    count = max(1, round(share * size))
    chosen = torch.rand(heads, size, generator=generator).topk(count, -1).indices
    return torch.zeros(heads, size, dtype=torch.bool).scatter_(-1, chosen, True)


def _channels(heads: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Spread of every channel, and which are outliers: float and bool [heads, 1, dim]."""
    spread = (0.5 * torch.randn(heads, 1, dim, generator=generator)).exp()
    return spread, _pick(heads, dim, OUTLIER_CHANNELS, generator)[:, None, :]


def _token_gain(heads: int, tokens: int, span: tuple[float, float], generator: torch.Generator) -> Tensor:
    gain = _uniform((heads, tokens), *span, generator)
    return torch.where(_pick(heads, tokens, OUTLIER_TOKENS, generator), gain, 1.0)[..., None]


def heavy_tailed(
    heads: int = 8, tokens: int = 1024, dim: int = 128, queries: int = 64, seed: int = 0
) -> AttentionSample:
    """One sample; the same seed gives the same statistics on every machine."""
    generator = torch.Generator().manual_seed(seed)
    spread, outlier = _channels(heads, dim, generator)
    gain = torch.where(outlier, _uniform((heads, 1, dim), *CHANNEL_GAIN, generator), 1.0)
    sign = torch.where(torch.rand(heads, 1, dim, generator=generator) < 0.5, -1.0, 1.0)
    noise = student((heads, tokens, dim), TAIL_FREEDOM, generator)
    key = spread * (torch.where(outlier, 0.25 * noise + sign, noise) * gain)
    key = key * _token_gain(heads, tokens, KEY_TOKEN_GAIN, generator)

    value_spread, _ = _channels(heads, dim, generator)
    value = value_spread * student((heads, tokens, dim), TAIL_FREEDOM, generator)
    value = value * _token_gain(heads, tokens, VALUE_TOKEN_GAIN, generator)
    value[:, 0] *= 0.1

    basis = torch.randn(heads, QUERY_RANK, dim, generator=generator) * spread / gain
    query = torch.randn(heads, queries, QUERY_RANK, generator=generator) @ basis
    query = query + 0.3 * torch.randn(heads, queries, dim, generator=generator) * spread / gain
    scores = query @ key.transpose(-1, -2) / math.sqrt(dim)
    query = query * (SCORE_SPREAD / scores.std(-1, keepdim=True))
    return AttentionSample(query, key, value)


def capture_attention(model: Any, token_ids: Tensor, queries: int = 64) -> list[AttentionSample]:
    """One sample per layer of a transformers model reading ``token_ids`` (int64 [1, tokens]).

    Keys and values are those of every token, one copy per query head; queries are those of the last ``queries`` tokens.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ModuleNotFoundError as error:
        raise MissingDependencyError("real models need transformers: pip install 'slimkv[transformers]'") from error
    samples: list[AttentionSample] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        all_keys, all_values = (states[0].repeat_interleave(group, 0).float() for states in (key, value))
        samples.append(AttentionSample(query[0, :, -queries:].float(), all_keys, all_values, causal=True))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_CAPTURE, record)
    AttentionMaskInterface.register(_CAPTURE, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_CAPTURE)
    try:
        with torch.no_grad():
            model(token_ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return samples
