"""``calibrate_model``: what ``slimkv calibrate`` does, for a model that is already loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimkv.calibration import Calibration
from slimkv.calibration.bit_allocation import choose_widths, chooses_widths
from slimkv.integrations.transformers.calibration.collect import gather_calibration


def calibrate_model(
    model: Any,
    path: str | Path | None = None,
    *,
    budget: float | None = None,
    profile: str | None = None,
    **options: Any,
) -> Calibration:
    """The calibration of a transformers model: statistics of its queries and, on request, widths per layer.

    Args:
        model: a loaded causal language model of transformers.
        path: also write it to this file, for other processes and engines.
        budget: choose a format for every layer: bits per number over all layers, scales included, such as 4.25.
        profile: choose formats for ``lossless``, ``balanced`` or ``aggressive`` instead of a budget.
        options: passed to ``gather_calibration``: the tokens to read (default: samples from the model), and progress.

    Use it as ``SlimKVCache(model, calibration=...)``; with a budget, also ``format="calibrated"``.
    """
    chooses = chooses_widths(budget, profile)
    options.setdefault("costs", chooses)
    made = gather_calibration(model, **options)
    if chooses:
        made = made.with_formats(choose_widths(made, budget, profile).formats)
    if path is not None:
        made.save(path)
    return made
