"""Attention on pages against stock attention on decoded keys and values: logits and greedy tokens.

Both paths read one cache, and each step compares what they make of the same codes. With a cache of its own for each
path, one key that rounds to another code would change every later layer and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv import attention
from slimkv.lab.evals.harness import STRICT, new_cache


@dataclass(frozen=True)
class PathReport:
    """Differences of logits are relative to the largest logit of their step."""

    largest_difference: float
    median_difference: float
    steps_beyond_1e3: int  # steps whose difference is above 1e-3: the newest key or value rounded to another code
    first_different_token: int | None  # of the two greedy texts; None: the same in all steps
    fused_calls: int
    decoded_calls: int  # layers of the fused path whose attention had to decode


def compare_paths(model: Any, ids: Tensor, format: str, *, steps: int) -> PathReport:
    """Greedy steps after ids [1, tokens], both paths fed the fused path's tokens."""
    cache = new_cache(model, format, STRICT)
    differences: list[float] = []
    first: int | None = None
    fused_calls = decoded_calls = 0

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()

    with attention(model):
        chosen = logits(ids.to(model.device))
    cache.activate_past_recording()  # so that a step can be taken back
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
