"""A calibration in SGLang: which one is meant, the widths it chose, and each rank's query-aware matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.cache import cached_calibration
from slimkv.codec import Codec
from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.sglang.compat import attention_tp


@lru_cache(maxsize=8)
def _load(path: str, model: str) -> Calibration:
    """One file serves all layers of a process."""
    return cached_calibration(model) if path == AUTO else Calibration.load(path)


def load_calibration(config: KVCacheConfig, model_config: Any) -> Calibration | None:
    """The calibration of the configuration, checked to be made for this model; a longer context is warned of once."""
    given = config.calibration
    if given is None:
        return None
    found = given if isinstance(given, Calibration) else _load(str(given), str(model_config.model_path))
    found.check_model(model_config.hf_text_config)
    found.warn_beyond(model_config.context_len)
    return found


def chosen_format(calibration: Calibration, layer: int) -> str:
    """The format that the calibration chose for a layer."""
    if calibration.formats is None or layer not in calibration.formats:
        raise InputError(
            f"slimkv: format 'calibrated' takes the widths from {calibration.name}, which chose none for layer "
            f"{layer}: run slimkv calibrate with --budget or --profile"
        )
    return calibration.formats[layer]


def rank_heads(total: int, held: int, rank: int, ranks: int) -> slice:
    """Which of a layer's ``total`` KV heads a rank holds: its share, or one that several ranks hold alike."""
    first = rank * held if total >= ranks else rank * total // ranks
    return slice(first, first + held)


def query_aware_matrices(
    calibration: Calibration, layer: int, codec: Codec, num_kv_heads: int, context: int
) -> Tensor | None:
    """``Calibration.query_aware_matrices`` for the KV heads of a layer that this rank holds."""
    rank, ranks = attention_tp()
    total = calibration.statistics(layer).num_kv_heads
    return calibration.query_aware_matrices(layer, codec, rank_heads(total, num_kv_heads, rank, ranks), context)
