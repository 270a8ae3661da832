"""Predictions with a packed cache compared with the stock cache: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slimkv.config import AUTO
from slimkv.lab.evals.harness import RAW, STOCK, Common, Run, each_window, with_prefill
from slimkv.lab.evals.statistics import Interval, mean_over_tokens

_SLICE = 128  # positions compared at a time, to bound memory


@dataclass(frozen=True)
class AgreementRow:
    """The figures of one cache."""

    format: str  # as requested: k4v4, k4v4+cal, calibrated; k4v4@8bit if prefill differs between rows
    top1: float  # share of positions whose most likely token is the same
    kl: float  # mean KL(raw || packed), nats
    kl_low: float  # its 95% interval, from blocks of tokens: see ``statistics``
    kl_high: float
    kl_99: float  # its 99th percentile over positions
    perplexity: float
    over_raw: float  # relative increase in perplexity: 0.05 is 5%
    over_raw_low: float  # its 95% interval
    over_raw_high: float
    over_raw_p: float  # two-sided p-value of no difference
    bytes_per_token: float  # see harness.bytes_per_token
    prefill: str  # see KVCacheConfig
    kl_growth: float | None  # growth of ``kl`` from the row with the first ``prefill``; None without it
    kl_growth_error: float | None  # its standard error over windows; None with one window or without growth


@dataclass(frozen=True)
class AgreementReport:
    """``slimkv eval agreement``."""

    model: str
    mode: str  # strict: attention reads every key and value through the codec; serving: new chunks are unquantised
    windows: int
    window_tokens: int
    raw_perplexity: float
    raw_bytes_per_token: float  # in bf16
    calibration: str | None  # the tokens it was made on; None: keys are rounded to the nearest level
    rows: tuple[AgreementRow, ...]
    seconds: float


def compare_logits(raw: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two logits [positions, vocabulary] -> same most likely token (bool) and KL(raw || other), both [positions]."""
    same, divergence = [], []
    for start in range(0, raw.shape[0], _SLICE):
        a = torch.log_softmax(raw[start : start + _SLICE].float(), -1)
        b = torch.log_softmax(other[start : start + _SLICE].float(), -1)
        same.append(a.argmax(-1) == b.argmax(-1))
        divergence.append((a.exp() * (a - b)).sum(-1))
    return torch.cat(same), torch.cat(divergence)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Negative log-likelihood [tokens - 1] of all ids [tokens] but the first, under logits [tokens, vocabulary]."""
    return cross_entropy(logits[:-1].float(), ids[1:], reduction="none")


def relative_increase(raw: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Interval, float]:
    """The relative increase in perplexity from ``raw`` to ``other``, and the p-value of no difference.

    Both are the losses [tokens] of each window; the windows are the same.
    """
    found, p = mean_over_tokens([b - a for a, b in zip(raw, other, strict=True)])
    return Interval(math.expm1(found.value), math.expm1(found.low), math.expm1(found.high)), p


def growth_over(base: Sequence[float], other: Sequence[float]) -> tuple[float, float | None]:
    """The relative growth of a mean over windows, and its standard error if there are several windows."""
    ratio = sum(other) / sum(base)
    rest = [b - ratio * a for a, b in zip(base, other, strict=True)]
    return ratio - 1, stdev(rest) * len(rest) ** 0.5 / sum(base) if len(rest) > 1 else None


def measure_agreement(
    model: Any, windows: Tensor, formats: Sequence[str], *, chunk: int = 256, prefill: Sequence[str] = (AUTO,),
    **common: Unpack[Common],
) -> AgreementReport:  # fmt: skip
    """Compares every position of windows int64 [count, tokens]. ``serving`` reads a window in passes of ``chunk``.

    ``prefill``: each format is measured in each of these (see ``KVCacheConfig``).
    """
    run = Run(formats, **common)
    kinds = with_prefill(run.kinds, prefill)
    formats = [kind.name for kind in kinds]
    nll: dict[str, list[Tensor]] = {name: [] for name in (RAW, *formats)}
    same: dict[str, list[Tensor]] = {w: [] for w in formats}
    divergence: dict[str, list[Tensor]] = {w: [] for w in formats}
    size: dict[str, float] = {}
    count, tokens = windows.shape
    raw_logits = windows.new_empty(0)
    for kind, ids, logits, each in each_window(model, windows, [STOCK, *kinds], run, chunk):
        format = kind.name
        nll[format].append(token_losses(logits, ids).double().cpu())
        size[format] = each
        if format == RAW:
            raw_logits = logits
            continue
        top, kl = compare_logits(raw_logits, logits)
        same[format].append(top.cpu())
        divergence[format].append(kl.double().cpu())
    base = math.exp(torch.cat(nll[RAW]).mean())
    rows = []
    for number, kind in enumerate(kinds):
        format, first = kind.name, kinds[number - number % len(prefill)].name
        kl, perplexity = torch.cat(divergence[format]), math.exp(torch.cat(nll[format]).mean())
        (around, _), (more, p) = mean_over_tokens(divergence[format]), relative_increase(nll[RAW], nll[format])
        of_windows = [[float(window.mean()) for window in divergence[name]] for name in (first, format)]
        growth, error = growth_over(*of_windows) if len(prefill) > 1 else (None, None)
        rows.append(
            AgreementRow(
                format=format, top1=float(torch.cat(same[format]).double().mean()), kl=float(kl.mean()),
                kl_low=around.low, kl_high=around.high, kl_99=float(kl.quantile(0.99)), perplexity=perplexity,
                over_raw=perplexity / base - 1, over_raw_low=more.low, over_raw_high=more.high, over_raw_p=p,
                bytes_per_token=size[format], prefill=kind.prefill, kl_growth=growth, kl_growth_error=error,
            )
        )  # fmt: skip
    rest = size[RAW], run.source, tuple(rows), run.seconds
    return AgreementReport(run.name, run.mode, count, tokens, base, *rest)
