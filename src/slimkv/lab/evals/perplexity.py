"""Perplexity of a model with a packed cache, compared with the stock cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slimkv.lab.evals.harness import RAW, STOCK, Common, Run, each_window
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
    model: Any, windows: Tensor, formats: Sequence[str], *, stride: int | None = None, chunk: int = 256,
    **common: Unpack[Common],
) -> PerplexityReport:  # fmt: skip
    """Perplexity over windows int64 [count, tokens] that start ``stride`` apart (default: no overlap).

    With overlap only the last ``stride`` tokens of later windows are scored. ``serving`` feeds a window in passes of
    ``chunk`` tokens.
    """
    run, (count, tokens) = Run(formats, **common), windows.shape
    stride = stride or tokens
    kinds = [STOCK, *run.kinds]
    formats = [kind.name for kind in kinds]
    losses: dict[str, list[Tensor]] = {format: [] for format in formats}
    size: dict[str, float] = {}
    overlap = tokens - stride if stride < tokens else 1  # tokens of later windows that were scored before
    for index, kind, ids, logits, each in each_window(model, windows, kinds, run, chunk):
        losses[kind.name].append(scored_nll(logits, ids, overlap if index else 1).double().cpu())
        size[kind.name] = each
    scored = tokens - 1 + (count - 1) * (tokens - overlap)
    rows = []
    for format in formats:
        nll, more = float(torch.cat(losses[format]).mean()), relative_increase(losses[RAW], losses[format])
        rows.append(PerplexityRow(format, math.exp(nll), more.value, more.low, more.high, nll, size[format]))
    return PerplexityReport(run.name, run.mode, count, tokens, stride, scored, run.source, tuple(rows), run.seconds)
