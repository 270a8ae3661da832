"""Do both ways of attending a packed cache agree: on the pages, and on decoded keys and values with stock attention?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.evals.running import STRICT, Progress, Stopwatch, check_mode, new_cache, quiet


@dataclass(frozen=True)
class PathReport:
    """``slimkv eval paths``."""

    model: str
    format: str
    mode: str
    prompt_tokens: int
    steps: int
    largest_difference: float  # of logits, over the largest logit of the step; the worst step
    median_difference: float
    first_different_token: int | None  # of the two greedy texts; None: all steps chose the same
    fused_calls: int
    decoded_calls: int  # of the fused run: layers whose attention had to decode
    seconds: float


def compare_paths(
    model: Any,
    ids: Tensor,
    word: str,
    *,
    steps: int = 200,
    name: str = "",
    mode: str = STRICT,
    progress: Progress = quiet,
) -> PathReport:
    """Greedy steps after ids [1, tokens], both paths fed the fused path's tokens."""
    from slimkv.integrations.transformers import attention

    check_mode(mode)
    watch = Stopwatch()
    fused_cache, decoded_cache = (new_cache(model, word, mode) for _ in range(2))
    differences: list[float] = []
    first: int | None = None
    calls = [0, 0]
    now = ids.to(model.device)
    for step in range(steps):
        progress(f"step {step}", step, steps)
        with torch.no_grad():
            with attention(model) as counts:
                fused = model(now, past_key_values=fused_cache, logits_to_keep=1).logits[0, -1].float()
            decoded = model(now, past_key_values=decoded_cache, logits_to_keep=1).logits[0, -1].float()
        calls = [calls[0] + counts.fused, calls[1] + counts.decoded]
        differences.append(float((fused - decoded).abs().max() / decoded.abs().max()))
        if first is None and int(fused.argmax()) != int(decoded.argmax()):
            first = step
        now = fused.argmax().reshape(1, 1)
    progress("done", steps, steps)
    middle = sorted(differences)[steps // 2]
    return PathReport(
        name, word, mode, ids.shape[1], steps, max(differences), middle, first, calls[0], calls[1], watch.seconds
    )
