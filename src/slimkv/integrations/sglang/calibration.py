"""Calibration in SGLang: which one is meant, the widths it chose, and each rank's rounding matrices."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration, ModelIdentity
from slimkv.codec import Codec
from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError, SlimKVError
from slimkv.integrations.sglang.compat import attention_tp
from slimkv.paths import cache_dir


@lru_cache(maxsize=8)
def _load(path: Path) -> Calibration:
    """One file serves all layers of a process."""
    return Calibration.load(path)


def find_calibration(config: KVCacheConfig, model_config: Any) -> Calibration | None:
    """The calibration that ``config`` names, checked to be made for this model; None where it names none."""
    given = config.calibration
    if given is None:
        return None
    if given == AUTO:
        return _made_before(model_config.hf_text_config, cache_dir("calibrations"))
    found = given if isinstance(given, Calibration) else _load(Path(given))
    found.check_model(model_config.hf_text_config)
    return found


def _made_before(hf_config: Any, folder: Path) -> Calibration:
    """The one calibration in ``folder`` that was made for a model of this configuration."""
    identity, matching = ModelIdentity.of(hf_config), []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found = _load(path)
            found.identity.check_same(identity, found.name)
        except SlimKVError:
            continue
        matching.append((path, found))
    if len(matching) == 1:
        return matching[0][1]
    if not matching:
        raise InputError(
            f"calibration='auto' found none for this model in {folder}: run slimkv calibrate, and give the file it "
            "writes as calibration"
        )
    names = ", ".join(path.name for path, _ in matching)
    raise InputError(
        f"calibration='auto' found several for models of this configuration in {folder} ({names}); "
        "give one of them as calibration"
    )


def calibrated_format(calibration: Calibration, layer: int) -> str:
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


def query_aware_matrices(calibration: Calibration, layer: int, codec: Codec, num_kv_heads: int) -> Tensor | None:
    """The matrices for the KV heads of a layer that this rank holds: int8 [num_kv_heads, key_dim, key_dim], or None."""
    rank, ranks = attention_tp()
    total = calibration.statistics(layer).num_kv_heads
    return calibration.query_aware_matrices(layer, codec, rank_heads(total, num_kv_heads, rank, ranks))
