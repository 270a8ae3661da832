"""Whether to believe the predicted cost of each layer: predicted against measured, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.predict import predicted_cost
from slimkv.lab.evals.agreement import compare_logits
from slimkv.lab.evals.harness import RAW, STRICT, Progress, Stopwatch, attending, new_cache, quiet, window_logits

_FORMATS = {"key": "k{bits}vraw", "value": "krawv{bits}"}  # raw holds the model's own dtype, whatever it is


@dataclass(frozen=True)
class WidthRow:
    """Keys or values of one layer packed, everything else as it is."""

    layer: int
    side: str
    bits: int
    predicted: float  # KL on the calibration's tokens
    kl: float  # measured: mean KL(raw || packed), nats


@dataclass(frozen=True)
class WidthReport:
    """``slimkv eval widths``."""

    model: str
    windows: int
    window_tokens: int
    calibration: str
    log_correlation: float  # of predicted and measured
    rows: tuple[WidthRow, ...]
    seconds: float


def measure_widths(
    model: Any,
    windows: Tensor,
    calibration: Calibration,
    bits: Sequence[int] = (3,),
    *,
    name: str = "",
    progress: Progress = quiet,
) -> WidthReport:
    """Packs one side of one layer at a time and compares predictions on windows int64 [count, tokens]; strict."""
    watch = Stopwatch()
    cells = [(layer, side, b) for b in bits for layer in sorted(calibration.layers) for side in _FORMATS]
    total: dict[tuple[int, str, int], list[Tensor]] = {cell: [] for cell in cells}
    steps = windows.shape[0] * len(cells)
    for index in range(windows.shape[0]):
        ids = windows[index : index + 1].to(model.device)
        raw = window_logits(model, ids, new_cache(model, RAW, STRICT))
        for number, cell in enumerate(cells):
            layer, side, width = cell
            progress(f"layer {layer}, {side}", index * len(cells) + number, steps)
            formats: dict[int | str, str] = {layer: _FORMATS[side].format(bits=width), "default": RAW}
            cache = new_cache(model, formats, STRICT, calibration=calibration)
            with attending(model, _FORMATS[side]):
                logits = window_logits(model, ids, cache)
            total[cell].append(compare_logits(raw, logits)[1].double().cpu())
    progress("done", steps, steps)
    rows = tuple(
        WidthRow(*cell, predicted_cost(calibration, cell[0], cell[2], cell[1]), float(torch.cat(total[cell]).mean()))
        for cell in cells
    )
    return WidthReport(
        name, windows.shape[0], windows.shape[1], calibration.source, log_correlation(rows), rows, watch.seconds
    )


def log_correlation(rows: Sequence[WidthRow]) -> float:
    """Pearson's correlation of the logarithms of predicted and measured costs."""
    numbers = torch.tensor([[r.predicted, max(r.kl, 1e-12)] for r in rows], dtype=torch.float64).log()
    return float(torch.corrcoef(numbers.mT)[0, 1])
