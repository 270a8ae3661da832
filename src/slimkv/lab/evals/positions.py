"""KL divergence and agreement by position in long windows: the cost of a format as the context grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.errors import InputError
from slimkv.lab.evals.agreement import compare_logits
from slimkv.lab.evals.harness import STOCK, STRICT, WITH_CALIBRATION, Progress, Stopwatch, attending, cache_kinds, quiet
from slimkv.lab.evals.plots import figure

EDGES = (256, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)


@dataclass(frozen=True)
class PositionRow:
    """One format, by range of positions."""

    format: str  # as requested, with ``+cal`` if it uses the calibration
    kl: tuple[float, ...]  # mean KL(raw || packed) of each range, nats
    top1: tuple[float, ...]  # share of its positions whose most likely token is the same
    mean_kl: float  # over all positions
    bytes: tuple[int, ...] = ()  # that the cache takes at the end of each range


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
    """The ranges that ``tokens`` positions are reported in."""
    return (*(edge for edge in EDGES if edge < tokens), tokens)


@torch.no_grad()
def measure_positions(
    model: Any,
    windows: Tensor,
    formats: Sequence[str],
    *,
    name: str = "",
    calibration: Calibration | None = None,
    chunk: int = 512,
    progress: Progress = quiet,
) -> PositionReport:
    """Reads windows int64 [count, tokens] with the stock cache and packed ones side by side.

    Attention reads every key and value through the codec, so passes of ``chunk`` tokens give the result of one pass
    without storing logits for the whole window. Formats are named as in ``cache_kinds``.
    """
    if chunk < 1:
        raise InputError(f"a chunk must have at least 1 token, not {chunk}")
    watch = Stopwatch()
    kinds = cache_kinds(formats, calibration)
    count, tokens = windows.shape
    kl = torch.zeros(len(kinds), count, tokens, dtype=torch.float64)
    same = torch.zeros(len(kinds), count, tokens, dtype=torch.float64)
    edges, sizes = range_edges(tokens), [list[int]() for _ in kinds]
    steps = count * -(-tokens // chunk)
    for index in range(count):
        ids = windows[index : index + 1].to(model.device)
        stock, *caches = (kind.new(model, STRICT, tokens) for kind in (STOCK, *kinds))
        for number, first in enumerate(range(0, tokens, chunk)):
            progress(f"window {index + 1}", index * -(-tokens // chunk) + number, steps)
            part = slice(first, first + chunk)
            raw = model(ids[:, part], past_key_values=stock, use_cache=True).logits[0]
            for which, (kind, cache) in enumerate(zip(kinds, caches, strict=True)):
                with attending(model, kind.format):
                    logits = model(ids[:, part], past_key_values=cache, use_cache=True).logits[0]
                top, divergence = compare_logits(raw, logits)
                kl[which, index, part], same[which, index, part] = divergence.double().cpu(), top.double().cpu()
                sizes[which] += [cache.nbytes] * sum(first < edge <= first + chunk for edge in edges)
    progress("done", steps, steps)
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
    read = calibration.source if calibration is not None else None
    return PositionReport(name, count, tokens, edges, read, rows, watch.seconds)


def plot_positions(report: PositionReport, path: Path) -> None:
    """KL divergence against position, and the bytes that the cache takes there: one line per format."""
    middles = [(a + b) / 2 for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    colours: dict[str, str] = {}
    with figure(path, columns=2) as (_, (axes, memory)):
        for row in report.rows:
            plain = row.format.removesuffix(WITH_CALIBRATION)
            colour = colours.setdefault(plain, f"C{len(colours)}")
            style = "o--" if row.format == plain else "o-"
            axes.plot(middles, row.kl, style, markersize=4, color=colour, label=row.format)
            memory.plot(report.edges, [x / 2**20 for x in row.bytes], style, markersize=4, color=colour)
        axes.set_yscale("log")
        axes.set_ylabel("KL divergence to the stock cache, nats")
        axes.legend()
        memory.set_ylabel("bytes of the cache, MiB")
        memory.set_ylim(0)
        for panel in (axes, memory):
            panel.set_xlabel("position")
