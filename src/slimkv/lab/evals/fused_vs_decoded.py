"""Do both ways of attending a packed cache agree: on the pages, and on decoded keys and values with stock attention?

Rounding a number to a code is a step: two computations that differ in the last bit of a float may fall on different
sides of it, and what follows then differs by a quantisation error, in every later layer and token. So by default both
ways read one cache, and each step compares what they make of the same codes. With ``independent`` each has a cache of
its own, and the differences are free to grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.lab.evals.harness import STRICT, Progress, Stopwatch, check_mode, new_cache, quiet


@dataclass(frozen=True)
class PathReport:
    """``slimkv eval paths``."""

    model: str
    format: str
    mode: str
    independent: bool  # each path with a cache of its own
    prompt_tokens: int
    steps: int
    largest_difference: float  # of logits, over the largest logit of the step; the worst step
    median_difference: float
    steps_beyond_1e3: int  # steps whose difference is above 1e-3: a number fell on the other side of a code boundary
    first_different_token: int | None  # of the two greedy texts; None: all steps chose the same
    fused_calls: int
    decoded_calls: int  # of the fused run: layers whose attention had to decode
    seconds: float


def compare_paths(
    model: Any,
    ids: Tensor,
    format: str,
    *,
    steps: int = 200,
    name: str = "",
    mode: str = STRICT,
    independent: bool = False,
    progress: Progress = quiet,
) -> PathReport:
    """Greedy steps after ids [1, tokens], both paths fed the fused path's tokens."""
    from slimkv.integrations.transformers import attention

    check_mode(mode)
    watch = Stopwatch()
    fused_cache = new_cache(model, format, mode)
    decoded_cache = new_cache(model, format, mode) if independent else fused_cache
    differences: list[float] = []
    first: int | None = None
    calls = [0, 0]

    def logits(tokens: Tensor, cache: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()

    now = ids.to(model.device)
    with attention(model):
        chosen = logits(now, fused_cache)
    if independent:
        logits(now, decoded_cache)
    else:
        fused_cache.activate_past_recording()  # so that a step can be taken back
    for step in range(steps):
        progress(f"step {step}", step, steps)
        now = chosen.argmax().reshape(1, 1)
        with attention(model) as counts:
            chosen = logits(now, fused_cache)
        if not independent:
            fused_cache.crop(-1)
        decoded = logits(now, decoded_cache)
        if not independent:
            fused_cache.crop(0)
        calls = [calls[0] + counts.fused, calls[1] + counts.decoded]
        differences.append(float((chosen - decoded).abs().max() / decoded.abs().max()))
        if first is None and int(chosen.argmax()) != int(decoded.argmax()):
            first = step
    progress("done", steps, steps)
    middle = sorted(differences)[steps // 2]
    beyond = sum(d > 1e-3 for d in differences)
    return PathReport(
        name, format, mode, independent, ids.shape[1], steps, max(differences), middle, beyond, first, calls[0],
        calls[1],
        watch.seconds,
    )  # fmt: skip
