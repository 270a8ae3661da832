"""A calibration file in vLLM: the widths it chose, and each rank's rounding matrices."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.integrations.vllm.compat import tensor_parallel_rank


@lru_cache(maxsize=8)
def load(path: Path) -> Calibration:
    """One file serves all layers of a process."""
    return Calibration.load(path)


def load_for(path: Path, model_config: Any) -> Calibration:
    """The file, checked to be made for this model."""
    found = load(path)
    found.check_model(model_config.hf_text_config)
    return found


def chosen_format(path: Path, model_config: Any, layer: int) -> str:
    """The format that the calibration chose for a layer."""
    formats = load_for(path, model_config).formats
    if formats is None or layer not in formats:
        raise InputError(
            f"slimkv: format 'calibrated' takes the widths from {path}, which chose none for layer {layer}: "
            "run slimkv calibrate with --budget or --profile"
        )
    return formats[layer]


def rank_heads(total: int, held: int, rank: int, ranks: int) -> slice:
    """Which of a layer's ``total`` KV heads a rank holds: its share, or one that several ranks hold alike."""
    first = rank * held if total >= ranks else rank * total // ranks
    return slice(first, first + held)


def query_aware_matrices(path: Path, model_config: Any, layer: int, codec: Codec, num_kv_heads: int) -> Tensor | None:
    """The matrices for the KV heads of a layer that this rank holds: int8 [num_kv_heads, key_dim, key_dim], or None."""
    calibration = load_for(path, model_config)
    rank, ranks = tensor_parallel_rank()
    total = calibration.statistics(layer).num_kv_heads
    return calibration.query_aware_matrices(layer, codec, rank_heads(total, num_kv_heads, rank, ranks))
