"""95% intervals of shares and means; paired tests of differences, and their verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.errors import InputError

BLOCK = 128  # adjacent tokens are not independent, so blocks are resampled
LEVEL = 0.05
NOT_DISTINGUISHABLE = "not distinguishable"
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


@dataclass(frozen=True)
class PairedTest:
    """A cache compared with the stock cache on the same questions or tokens."""

    difference: float  # this minus raw
    low: float  # 95%, bootstrap over contexts
    high: float
    p: float  # two-sided; the larger of McNemar's and the bootstrap's if both apply
    only_raw: int | None = None  # questions that only the stock cache answered
    only_this: int | None = None


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test from the two counts of disagreement."""
    total, least = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, i) for i in range(least + 1))
    return min(1.0, 2 * tail / 2**total)


def paired_answers(raw: Sequence[bool], other: Sequence[bool], clusters: Sequence[object]) -> PairedTest:
    """Tests two caches on the same questions; ``clusters`` names the text that each question is about."""
    if not len(raw) == len(other) == len(clusters) or not raw:
        raise InputError(f"answers do not pair: {len(raw)} and {len(other)} in {len(clusters)} texts")
    by_cluster: dict[object, list[float]] = {}
    for a, b, cluster in zip(raw, other, clusters, strict=True):
        by_cluster.setdefault(cluster, []).append(float(b) - float(a))
    only_raw = sum(a and not b for a, b in zip(raw, other, strict=True))
    only_other = sum(b and not a for a, b in zip(raw, other, strict=True))
    groups = list(by_cluster.values())
    interval, p = bootstrap([sum(g) for g in groups], [len(g) for g in groups])
    if only_raw == only_other == 0:
        return PairedTest(0.0, 0.0, 0.0, 1.0, 0, 0)
    p = max(p, mcnemar(only_raw, only_other))
    return PairedTest(interval.value, interval.low, interval.high, p, only_raw, only_other)


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests with Holm's correction, which bounds the chance of any false positive."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, least = [1.0] * len(values), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[index]))
        out[index] = least
    return out


def verdict(difference: float, p: float, higher_is_better: bool = True) -> str:
    """``better``, ``worse`` or ``not distinguishable`` (p of 0.05 or more)."""
    if p >= LEVEL or difference == 0:
        return NOT_DISTINGUISHABLE
    return "better" if (difference > 0) == higher_is_better else "worse"
