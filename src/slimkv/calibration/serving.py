"""What every serving engine does with a calibration: finds it, takes its widths, and hands each rank its matrices."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.cache import cached_calibration
from slimkv.calibration.calibration import Calibration
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.formats import AUTO


def served_calibration(
    given: Calibration | str | Path | None, model: str, config: Any, max_positions: int
) -> Calibration | None:
    """The calibration that an engine's settings name, checked to be made for this model.

    Args:
        given: the field ``calibration`` of ``KVCacheConfig``.
        model: the folder or hub name that the engine serves; ``auto`` is found by it.
        config: the model's configuration of transformers.
        max_positions: of the longest context that is served; more than the statistics hold for is warned of once.
    """
    if given is None:
        return None
    found = given if isinstance(given, Calibration) else _load(str(given), model)
    found.check_model(config)
    found.warn_beyond(max_positions)
    return found


@lru_cache(maxsize=8)
def _load(path: str, model: str) -> Calibration:
    """One file serves all layers of a process."""
    return cached_calibration(model) if path == AUTO else Calibration.load(path)


def chosen_format(calibration: Calibration, layer: int) -> str:
    """The format that the calibration chose for a layer."""
    formats = calibration.formats
    if formats is None or layer not in formats:
        raise InputError(
            f"slimkv: format 'calibrated' takes the widths from {calibration.name}, which chose none for layer "
            f"{layer}: run slimkv calibrate with --budget or --profile"
        )
    return formats[layer]


def rank_heads(total: int, held: int, rank: int, ranks: int) -> slice:
    """Which of a layer's ``total`` KV heads a rank holds: its share, or one that several ranks hold alike."""
    first = rank * held if total >= ranks else rank * total // ranks
    return slice(first, first + held)


def rank_offset(
    calibration: Calibration, layer: int, held: int, rank: int, ranks: int, device: torch.device
) -> Tensor | None:
    """``Calibration.key_offset`` for the ``held`` KV heads of a layer that a rank has."""
    heads = rank_heads(calibration.statistics(layer).num_kv_heads, held, rank, ranks)
    return calibration.key_offset(layer, device, heads)


def rank_matrices(
    calibration: Calibration, layer: int, codec: Codec, held: int, rank: int, ranks: int, max_positions: int
) -> Tensor | None:
    """``Calibration.query_aware_matrices`` for the ``held`` KV heads of a layer that a rank has."""
    heads = rank_heads(calibration.statistics(layer).num_kv_heads, held, rank, ranks)
    return calibration.query_aware_matrices(layer, codec, heads, max_positions)
