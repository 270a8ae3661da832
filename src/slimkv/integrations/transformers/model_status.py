"""``status(model)``: what ``enable`` set up on a model, and what the last ``generate`` did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from slimkv.errors import InputError
from slimkv.integrations.transformers.cache import CacheSize
from slimkv.integrations.transformers.enabling import STOCK, enabled
from slimkv.integrations.transformers.switching import Counts


@dataclass(frozen=True)
class Status:
    """How a model stores and attends its keys and values; printable."""

    enabled: bool  # whether ``generate`` uses a packed cache
    formats: dict[str, int] = field(default_factory=dict)  # layers by format
    calibration: str | None = None  # the tokens it was made on; None: keys are rounded without one
    fused: bool = False  # attention reads packed codes; otherwise the model's own attention gets decoded tensors
    calls: Counts | None = None  # how attention ran in the last ``generate``, in calls of a layer
    size: CacheSize | None = None  # of its cache, at its end

    @property
    def packed_layers(self) -> int:
        """The packed layers."""
        return sum(count for name, count in self.formats.items() if name != STOCK)

    def __str__(self) -> str:
        if not self.enabled:
            return "slimkv is off: generate uses the stock cache"
        formats = ", ".join(f"{count} {name}" for name, count in self.formats.items())
        lines = [
            f"slimkv is on: {self.packed_layers} of {sum(self.formats.values())} layers are packed ({formats})",
            f"calibration: {self.calibration or 'none'}",
            f"attention: {'reads packed codes' if self.fused else 'gets decoded keys and values'}",
        ]
        if self.calls is not None:
            lines.append(
                f"last generate: {self.size}; attention calls: {self.calls.fused} on packed codes, "
                f"{self.calls.decoded} decoded, {self.calls.plain} on keys and values not yet packed"
            )
        return "\n".join(lines)


def status(model: Any) -> Status:
    """What ``slimkv.enable`` set up on ``model``, and what the last ``generate`` did."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"slimkv.status takes a model, not {type(model).__name__}")
    record = enabled(model)
    if record is None:
        return Status(enabled=False)
    calls, size = record.last or (None, None)
    return Status(True, dict(record.formats), record.calibration, bool(record.configs), calls, size)
