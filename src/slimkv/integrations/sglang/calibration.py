"""A calibration in SGLang: which one is meant, and each rank's query-aware matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.serving import rank_matrices, served_calibration
from slimkv.codec import Codec
from slimkv.config import KVCacheConfig
from slimkv.integrations.sglang.compat import attention_tp


def load_calibration(config: KVCacheConfig, model_config: Any) -> Calibration | None:
    """The calibration of the configuration, checked to be made for this model; a longer context is warned of once."""
    return served_calibration(
        config.calibration, str(model_config.model_path), model_config.hf_text_config, model_config.context_len
    )


def query_aware_matrices(
    calibration: Calibration, layer: int, codec: Codec, num_kv_heads: int, context: int
) -> Tensor | None:
    """``Calibration.query_aware_matrices`` for the KV heads of a layer that this rank holds."""
    return rank_matrices(calibration, layer, codec, num_kv_heads, *attention_tp(), context)
