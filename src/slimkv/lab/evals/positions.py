"""KL divergence and agreement by position in long windows: the cost of a format as the context grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.lab.evals.agreement import compare_logits
from slimkv.lab.evals.harness import STOCK, STRICT, Common, Run, attending

EDGES = (256, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)


@dataclass(frozen=True)
class PositionRow:
    """One format, by range of positions."""

    format: str  # as requested, with ``+cal`` if it uses the calibration
    kl: tuple[float, ...]  # mean KL(raw || packed) of each range, nats
    top1: tuple[float, ...]  # share of its positions whose most likely token is the same
    mean_kl: float  # over all positions
    bytes: tuple[int, ...] = ()  # allocated by the cache at the end of each range


@dataclass(frozen=True)
class PositionReport:
    """``slimkv eval positions``."""

    model: str
    windows: int
    window_tokens: int
    edges: tuple[int, ...]  # where ranges end; the first begins at 0
    calibration: str | None
    rows: tuple[PositionRow, ...]
    seconds: float


def range_edges(tokens: int) -> tuple[int, ...]:
    """The ends of the ranges of positions in a window of ``tokens``."""
    return (*(edge for edge in EDGES if edge < tokens), tokens)


@torch.no_grad()
def measure_positions(
    model: Any, windows: Tensor, formats: Sequence[str], *, chunk: int = 512, **common: Unpack[Common]
) -> PositionReport:
    """Reads windows int64 [count, tokens] with the stock cache and packed ones side by side.

    Attention reads every key and value through the codec, so passes of ``chunk`` tokens give the result of one pass
    without storing logits for the whole window. Formats are named as in ``cache_kinds``.
    """
    if chunk < 1:
        raise InputError(f"a chunk must have at least 1 token, not {chunk}")
    run, (count, tokens) = Run(formats, **common), windows.shape
    kinds = run.kinds
    kl = torch.zeros(len(kinds), count, tokens, dtype=torch.float64)
    same = torch.zeros(len(kinds), count, tokens, dtype=torch.float64)
    edges, sizes = range_edges(tokens), [list[int]() for _ in kinds]
    work = list(product(range(count), range(0, tokens, chunk)))
    for index, first in run.each(work, lambda item: f"window {item[0] + 1}"):
        if first == 0:
            stock, *caches = (kind.new(model, STRICT, tokens) for kind in (STOCK, *kinds))
        part = slice(first, first + chunk)
        ids = windows[index : index + 1, part].to(model.device)
        raw = model(ids, past_key_values=stock, use_cache=True).logits[0]
        for which, (kind, cache) in enumerate(zip(kinds, caches, strict=True)):
            with attending(model, kind.format):
                logits = model(ids, past_key_values=cache, use_cache=True).logits[0]
            top, divergence = compare_logits(raw, logits)
            kl[which, index, part], same[which, index, part] = divergence.double().cpu(), top.double().cpu()
            sizes[which] += [cache.nbytes] * sum(first < edge <= first + chunk for edge in edges)
    ranges = list(zip((0, *edges[:-1]), edges, strict=True))
    rows = tuple(
        PositionRow(
            kind.name,
            tuple(float(kl[i, :, a:b].mean()) for a, b in ranges),
            tuple(float(same[i, :, a:b].mean()) for a, b in ranges),
            float(kl[i].mean()),
            tuple(sizes[i][: len(edges)]),
        )
        for i, kind in enumerate(kinds)
    )
    return PositionReport(run.name, count, tokens, edges, run.source, rows, run.seconds)
