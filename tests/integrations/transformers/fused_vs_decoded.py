"""Compares attention on pages with stock attention on decoded keys and values: logits and greedy tokens.

Both paths read the same cache, so that each step compares results from the same codes. With separate caches, a single
key that rounds to another code would change all later layers and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv import attention
from slimkv.lab.evals.harness import STRICT, CacheKind


@dataclass(frozen=True)
class PathReport:
    """Differences between logits, relative to the largest logit of the step."""

    largest_difference: float
    median_difference: float
    steps_beyond_1e3: int  # steps with a difference above 1e-3: a new key or value was rounded to another code
    first_different_token: int | None  # first step with different greedy tokens; None: all tokens are equal
    fused_calls: int
    decoded_calls: int  # attention calls of the fused path that had to decode


def compare_paths(model: Any, ids: Tensor, format: str, *, steps: int) -> PathReport:
    """Compares greedy steps after ids [1, tokens]. Both paths continue with the fused path's tokens."""
    cache = CacheKind(format, format).new(model, STRICT)
    differences: list[float] = []
    first: int | None = None
    fused_calls = decoded_calls = 0

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()

    with attention(model):
        chosen = logits(ids.to(model.device))
    cache.activate_past_recording()  # so that a step can be undone
    for step in range(steps):
        now = chosen.argmax().reshape(1, 1)
        with attention(model) as counts:
            chosen = logits(now)
        cache.crop(-1)
        decoded = logits(now)
        cache.crop(0)
        fused_calls, decoded_calls = fused_calls + counts.fused, decoded_calls + counts.decoded
        differences.append(float((chosen - decoded).abs().max() / decoded.abs().max()))
        if first is None and int(chosen.argmax()) != int(decoded.argmax()):
            first = step
    return PathReport(
        max(differences), sorted(differences)[steps // 2], sum(d > 1e-3 for d in differences), first, fused_calls,
        decoded_calls,
    )  # fmt: skip
