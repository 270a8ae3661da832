"""The noise that quantised keys add to attention scores, layer by layer: the figure of the engines' guard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.guard import MAX_SCORE_ERROR
from slimkv.lab.evals.harness import STRICT, Progress, Stopwatch, cache_kinds, quiet


@dataclass(frozen=True)
class ScoreRow:
    """One format: the figure of every packed layer, in nats."""

    format: str
    layers: dict[int, float]
    worst: float
    healthy: bool  # whether every layer is within the guard's default limit


@dataclass(frozen=True)
class ScoreReport:
    """The score errors of one model."""

    model: str
    tokens: int
    limit: float
    rows: tuple[ScoreRow, ...]
    seconds: float


def measure_scores(
    model: Any,
    ids: Tensor,
    formats: Sequence[str],
    *,
    name: str = "",
    calibration: Calibration | None = None,
    progress: Progress = quiet,
) -> ScoreReport:
    """Compares scores from stored keys with exact ones on ids int64 [1, tokens], for each format."""
    from slimkv.integrations.transformers.calibration.score_errors import layer_score_errors

    watch = Stopwatch()
    kinds = cache_kinds(formats, calibration)
    rows = []
    for number, kind in enumerate(kinds):
        progress(kind.name, number, len(kinds))
        figures = layer_score_errors(model, kind.new(model, STRICT), ids)
        worst = max(figures.values(), default=0.0)
        rows.append(ScoreRow(kind.name, figures, worst, worst <= MAX_SCORE_ERROR))
    progress("done", len(kinds), len(kinds))
    return ScoreReport(name, ids.shape[1], MAX_SCORE_ERROR, tuple(rows), watch.seconds)
