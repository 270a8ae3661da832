"""Perplexity of a model with a packed cache, compared with the stock cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slimkv.calibration import Calibration
from slimkv.lab.evals.harness import (
    RAW,
    SERVING,
    STOCK,
    STRICT,
    Progress,
    Stopwatch,
    attending,
    bytes_per_token,
    cache_kinds,
    check_mode,
    quiet,
    window_logits,
)  # fmt: skip
from slimkv.lab.evals.intervals import Interval, mean_interval


@dataclass(frozen=True)
class PerplexityRow:
    """One cache."""

    format: str  # as requested: raw, k4v4, k4v4+cal, calibrated
    perplexity: float
    over_raw: float  # relative to the stock cache: 0.05 is 5% more
    over_raw_low: float  # its 95% interval, from blocks of tokens: see ``intervals``
    over_raw_high: float
    nll: float  # mean negative log-likelihood, in nats per token
    bytes_per_token: float  # see harness.bytes_per_token


@dataclass(frozen=True)
class PerplexityReport:
    """``slimkv eval perplexity``."""

    model: str
    mode: str  # strict: attention reads every key and value through the codec; serving: fresh chunks raw
    windows: int
    window_tokens: int
    stride: int
    scored_tokens: int
    calibration: str | None  # the tokens it was made on; None: keys are rounded to the nearest level
    rows: tuple[PerplexityRow, ...]  # the first is the stock cache
    seconds: float


def scored_nll(logits: Tensor, ids: Tensor, first: int = 1) -> Tensor:
    """Negative log-likelihood [tokens - first] of ids [tokens] from ``first`` on, under logits [tokens, vocabulary]."""
    return cross_entropy(logits[first - 1 : -1].float(), ids[first:], reduction="none")


def relative_increase(raw: Sequence[Tensor], other: Sequence[Tensor]) -> Interval:
    """By how much the perplexity of ``other`` exceeds that of ``raw``, from losses [tokens] of the same windows."""
    found = mean_interval([b - a for a, b in zip(raw, other, strict=True)])
    return Interval(math.expm1(found.value), math.expm1(found.low), math.expm1(found.high))


def measure_perplexity(
    model: Any,
    windows: Tensor,
    formats: Sequence[str],
    *,
    name: str = "",
    mode: str = STRICT,
    stride: int | None = None,
    chunk: int = 256,
    progress: Progress = quiet,
    calibration: Calibration | None = None,
) -> PerplexityReport:
    """Perplexity over windows int64 [count, tokens] that start ``stride`` apart (default: no overlap).

    With overlap only the last ``stride`` tokens of later windows are scored. ``serving`` feeds a window in passes of
    ``chunk`` tokens.
    """
    check_mode(mode)
    watch = Stopwatch()
    count, tokens = windows.shape
    stride = stride or tokens
    kinds = [STOCK, *cache_kinds(formats, calibration)]
    formats = [kind.name for kind in kinds]
    losses: dict[str, list[Tensor]] = {format: [] for format in formats}
    size: dict[str, float] = {}
    scored = 0
    for index in range(count):
        first = 1 if index == 0 or stride >= tokens else tokens - stride
        ids = windows[index : index + 1].to(model.device)
        scored += tokens - first
        for number, kind in enumerate(kinds):
            format = kind.name
            progress(format, index * len(formats) + number, count * len(formats))
            cache = kind.new(model, mode)
            with attending(model, kind.format):
                logits = window_logits(model, ids, cache, chunk if mode == SERVING and format != RAW else None)
            losses[format].append(scored_nll(logits, ids[0], first).double().cpu())
            size[format] = bytes_per_token(cache)
    progress("done", count * len(formats), count * len(formats))
    rows = []
    for format in formats:
        nll, more = float(torch.cat(losses[format]).mean()), relative_increase(losses[RAW], losses[format])
        rows.append(PerplexityRow(format, math.exp(nll), more.value, more.low, more.high, nll, size[format]))
    read = calibration.source if calibration is not None else None
    return PerplexityReport(name, mode, count, tokens, stride, scored, read, tuple(rows), watch.seconds)
