"""Where in a model the error arises: attention error of every layer on that layer's own queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimkv.lab.evals.attention import attention_error
from slimkv.lab.evals.capture import capture_attention
from slimkv.lab.evals.harness import Progress, Stopwatch, quiet
from slimkv.spec import CodecSpec


@dataclass(frozen=True)
class LayerRow:
    """One format: relative errors by layer."""

    format: str
    output: tuple[float, ...]  # of the attention output
    key: tuple[float, ...]
    value: tuple[float, ...]


@dataclass(frozen=True)
class LayerReport:
    """``slimkv eval layers``."""

    model: str
    tokens: int
    rows: tuple[LayerRow, ...]
    seconds: float


def measure_layers(
    model: Any, ids: Tensor, formats: Sequence[str], *, name: str = "", progress: Progress = quiet
) -> LayerReport:
    """Every layer of the model reading ids [1, tokens] sees what the stock cache gives it, and answers from codes."""
    watch = Stopwatch()
    progress("reading", 0, len(formats))
    samples = capture_attention(model, ids.to(model.device))
    rows = []
    for number, format in enumerate(formats):
        progress(format, number, len(formats))
        errors = [attention_error(s, CodecSpec.parse(format, s.key.shape[-1], s.value.shape[-1])) for s in samples]
        parts = ([e.output for e in errors], [e.key for e in errors], [e.value for e in errors])
        rows.append(LayerRow(format, *(tuple(float(x) for x in part) for part in parts)))
    progress("done", len(formats), len(formats))
    return LayerReport(name, ids.shape[1], tuple(rows), watch.seconds)
