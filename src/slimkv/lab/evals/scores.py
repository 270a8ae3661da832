"""The noise that quantised keys add to attention scores, by layer. The engines' fidelity guard limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from slimkv.calibration.guard import MAX_SCORE_ERROR, score_errors
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
    run, rows = Run(formats, **common), []
    for kind in run.each(run.kinds, lambda kind: kind.name):
        figures = layer_score_errors(model, kind.new(model, STRICT), ids)
        worst = max(figures.values(), default=0.0)
        rows.append(ScoreRow(kind.name, figures, worst, worst <= MAX_SCORE_ERROR))
    return ScoreReport(run.name, ids.shape[1], MAX_SCORE_ERROR, tuple(rows), run.seconds)


def layer_score_errors(model: Any, cache: Any, ids: Tensor) -> dict[int, float]:
    """The noise in the scores of each packed layer, in nats, for its worst KV head; the model reads ``ids``.

    ``cache``: an empty ``SlimKVCache`` of the model, with the formats to measure; it is filled.
    """
    from slimkv.integrations.transformers.layers import PackedLayer
    from slimkv.integrations.transformers.plugin import observed_attention
    from slimkv.integrations.transformers.stock_attention import layer_number

    found: dict[int, float] = {}

    def observe(out: Tensor, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        number = layer_number(module)
        layer = cache.layers[number] if number < len(cache.layers) else None
        if isinstance(layer, PackedLayer) and number not in found:
            layer.update(key, value)
            states = layer.keys
            assert states is not None
            stored = states.decoded()
            tokens = stored.shape[2]  # those that a sliding layer still holds
            queries, keys, kept = (x[0, :, -tokens:].transpose(0, 1) for x in (query, key, stored))
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            found[number] = float(score_errors(queries, keys, kept, scale).max())
        return out

    with observed_attention(model, observe), torch.no_grad():
        model(ids.to(model.device), use_cache=False)
    return dict(sorted(found.items()))
