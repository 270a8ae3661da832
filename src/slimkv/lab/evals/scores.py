"""The noise that quantised keys add to attention scores, layer by layer: what the fidelity guard of engines limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor

from slimkv.calibration.guard import MAX_SCORE_ERROR
from slimkv.lab.evals.harness import STRICT, Common, Run


@dataclass(frozen=True)
class ScoreRow:
    """One format: the noise of every packed layer, in nats."""

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


def measure_scores(model: Any, ids: Tensor, formats: Sequence[str], **common: Unpack[Common]) -> ScoreReport:
    """Compares scores from stored keys with exact ones on ids int64 [1, tokens], for each format."""
    from slimkv.integrations.transformers.calibration.score_errors import layer_score_errors

    run, rows = Run(formats, **common), []
    for kind in run.each(run.kinds, lambda kind: kind.name):
        figures = layer_score_errors(model, kind.new(model, STRICT), ids)
        worst = max(figures.values(), default=0.0)
        rows.append(ScoreRow(kind.name, figures, worst, worst <= MAX_SCORE_ERROR))
    return ScoreReport(run.name, ids.shape[1], MAX_SCORE_ERROR, tuple(rows), run.seconds)
