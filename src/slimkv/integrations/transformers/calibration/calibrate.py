"""``calibrate_model``: what ``slimkv calibrate`` does, for a model that is already loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimkv.calibration import Calibration
from slimkv.calibration.bit_allocation import budget_bytes, profile_bytes, solve_widths
from slimkv.errors import InputError
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
        model: a causal language model of transformers, loaded.
        path: also write it to this file, for other processes and engines.
        budget: choose a format for every layer: bits per number over all layers, scales included, such as 4.25.
        profile: choose formats for ``lossless``, ``balanced`` or ``aggressive`` instead of a budget.
        options: of ``gather_calibration``: the tokens to read (by default samples from the model itself), and progress.

    Use it as ``SlimKVCache(model, calibration=...)``; with a budget, also ``format="calibrated"``.
    """
    if budget is not None and profile is not None:
        raise InputError(f"budget={budget} and profile={profile!r} both choose the widths; give one of them")
    options.setdefault("costs", budget is not None or profile is not None)
    made = gather_calibration(model, **options)
    if budget is not None or profile is not None:
        size = budget_bytes(made, budget) if budget is not None else profile_bytes(made, str(profile))
        made = made.with_formats(solve_widths(made, size).formats)
    if path is not None:
        made.save(path)
    return made
