"""95% intervals of shares and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.errors import InputError

BLOCK = 128  # adjacent tokens are not independent, so blocks are resampled
_Z = 1.959963984540054  # two-sided, 95%


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """The share of successes with Wilson's score interval."""
    if not 0 <= successes <= trials or trials < 1:
        raise InputError(f"{successes} successes of {trials} trials is not a valid share")
    share, z2 = successes / trials, _Z * _Z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return Interval(share, min(max(0.0, middle - half), share), max(min(1.0, middle + half), share))


def bootstrap(
    sums: Sequence[float], counts: Sequence[int], samples: int = 10_000, seed: int = 0
) -> tuple[Interval, float]:
    """The mean of numbers in clusters of given sums and counts: its 95% interval, and a two-sided p-value against 0.

    Numbers of one cluster (questions about one text, tokens of one passage) are not independent, so clusters are
    resampled, not numbers.
    """
    if not sums or len(sums) != len(counts) or min(counts) < 1:
        raise InputError(f"a bootstrap needs clusters with numbers in them, not {len(sums)} sums of {len(counts)}")
    total, size = torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    mean = float(total.sum() / size.sum())
    drawn = torch.randint(len(sums), (samples, len(sums)), generator=torch.Generator().manual_seed(seed))
    means = total[drawn].sum(1) / size[drawn].sum(1)
    low, high = (float(means.quantile(q)) for q in (0.025, 0.975))
    below, above = int((means <= 0).sum()), int((means >= 0).sum())
    p = min(1.0, 2 * (min(below, above) + 1) / (samples + 1))
    return Interval(mean, min(low, mean), max(high, mean)), p


def mean_over_tokens(windows: Sequence[Tensor]) -> tuple[Interval, float]:
    """``bootstrap`` of one number per token, float [tokens] for each window, with blocks of ``BLOCK`` tokens."""
    blocks = [block for window in windows for block in window.double().cpu().split(BLOCK)]
    return bootstrap([float(block.sum()) for block in blocks], [len(block) for block in blocks])
