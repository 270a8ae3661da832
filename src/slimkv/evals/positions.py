"""KL divergence and agreement by position in long windows: what a format costs as a context grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.errors import InputError
from slimkv.evals.agreement import compare_logits
from slimkv.evals.harness import RAW, STRICT, Progress, Stopwatch, attending, new_cache, quiet
from slimkv.evals.plots import figure
from slimkv.spec import Kind, parse_format

EDGES = (256, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
_SUFFIX = " calibrated"


@dataclass(frozen=True)
class PositionRow:
    """One format, by range of positions."""

    format: str
    calibrated: bool
    kl: tuple[float, ...]  # mean KL(raw || packed) of each range, nats
    top1: tuple[float, ...]  # share of its positions whose most likely token is the same
    mean_kl: float  # over all positions

    @property
    def name(self) -> str:
        """The format, and whether it is calibrated."""
        return self.format + (_SUFFIX if self.calibrated else "")


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

    Attention reads every key and value through the codec, so that passes of ``chunk`` tokens give what one pass would,
    in memory that does not grow with the vocabulary times the window. With a calibration each format whose keys are
    Lloyd-Max codes is measured without and with it.
    """
    if chunk < 1:
        raise InputError(f"a chunk must have at least 1 token, not {chunk}")
    watch = Stopwatch()
    variants = [(f, with_it) for f in formats if f != RAW for with_it in (False, True)]
    variants = [(f, w) for f, w in variants if not w or (calibration is not None and _shaped(f))]
    count, tokens = windows.shape
    kl = torch.zeros(len(variants), count, tokens, dtype=torch.float64)
    same = torch.zeros(len(variants), count, tokens, dtype=torch.float64)
    steps = count * -(-tokens // chunk)
    for index in range(count):
        ids = windows[index : index + 1].to(model.device)
        caches = [new_cache(model, RAW, STRICT)]
        caches += [new_cache(model, f, STRICT, calibration=calibration if w else None) for f, w in variants]
        for number, first in enumerate(range(0, tokens, chunk)):
            progress(f"window {index + 1}", index * -(-tokens // chunk) + number, steps)
            part = slice(first, first + chunk)
            raw = model(ids[:, part], past_key_values=caches[0], use_cache=True).logits[0]
            for variant, ((format, _), cache) in enumerate(zip(variants, caches[1:], strict=True)):
                with attending(model, format):
                    logits = model(ids[:, part], past_key_values=cache, use_cache=True).logits[0]
                top, divergence = compare_logits(raw, logits)
                kl[variant, index, part], same[variant, index, part] = divergence.double().cpu(), top.double().cpu()
    progress("done", steps, steps)
    edges = range_edges(tokens)
    ranges = list(zip((0, *edges[:-1]), edges, strict=True))
    rows = tuple(
        PositionRow(
            format,
            with_it,
            tuple(float(kl[i, :, a:b].mean()) for a, b in ranges),
            tuple(float(same[i, :, a:b].mean()) for a, b in ranges),
            float(kl[i].mean()),
        )
        for i, (format, with_it) in enumerate(variants)
    )
    read = calibration.source if calibration is not None else None
    return PositionReport(name, count, tokens, edges, read, rows, watch.seconds)


def _shaped(format: str) -> bool:
    return parse_format(format)[0].kind == Kind.LLOYD


def plot_positions(report: PositionReport, path: Path) -> None:
    """KL divergence against position, one line per format."""
    middles = [(a + b) / 2 for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    colours: dict[str, str] = {}
    with figure(path) as (_, axes):
        for row in report.rows:
            colour = colours.setdefault(row.format, f"C{len(colours)}")
            style = "-" if row.calibrated else "--"
            axes.plot(middles, row.kl, "o" + style, markersize=4, color=colour, label=row.name)
        axes.set_yscale("log")
        axes.set_xlabel("position")
        axes.set_ylabel("KL divergence to the stock cache, nats")
        axes.legend()
