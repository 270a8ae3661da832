"""Perplexity of a model with a packed cache, against the same model with the stock one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class PerplexityRow:
    """One cache."""

    format: str  # as it was asked for: raw, k4v4, k4v4+cal, calibrated
    perplexity: float
    over_raw: float  # relative to the stock cache: 0.05 is 5% more
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
    calibration: str | None  # what it was made on; None: keys are rounded to the nearest level
    rows: tuple[PerplexityRow, ...]  # the first is the stock cache
    seconds: float


def scored_nll(logits: Tensor, ids: Tensor, first: int = 1) -> Tensor:
    """Negative log-likelihood [tokens - first] of ids [tokens] from ``first`` on, under logits [tokens, vocabulary]."""
    return cross_entropy(logits[first - 1 : -1].float(), ids[first:], reduction="none")


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
    total: dict[str, float] = dict.fromkeys(formats, 0.0)
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
            total[format] += float(scored_nll(logits, ids[0], first).double().sum())
            size[format] = bytes_per_token(cache)
    progress("done", count * len(formats), count * len(formats))
    base = math.exp(total[RAW] / scored)
    rows = []
    for format in formats:
        perplexity = math.exp(total[format] / scored)
        rows.append(PerplexityRow(format, perplexity, perplexity / base - 1, total[format] / scored, size[format]))
    read = calibration.source if calibration is not None else None
    return PerplexityReport(name, mode, count, tokens, stride, scored, read, tuple(rows), watch.seconds)
