"""Helpers that build a cache: settings, layers and their formats, key offsets, and the guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slimkv.calibration import Calibration, ModelIdentity
from slimkv.calibration.guard import Guard
from slimkv.config import AUTO, CALIBRATED, RAW, RAW_LATENT, KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.formats import is_latent_format
from slimkv.integrations.transformers import compat
from slimkv.integrations.transformers.calibration.offsets import seen_keys
from slimkv.integrations.transformers.ladder import in_tiers
from slimkv.integrations.transformers.layer_settings import LayerSettings
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.sliding import PackedSlidingLayer
from slimkv.integrations.transformers.stateful_layers import (
    PackedHybridLayer,
    PackedHybridSlidingLayer,
    PackedIndexedLayer,
)
from slimkv.integrations.transformers.tiers import TieredLayer
from slimkv.spec import PageLayout, parse_spec

STOCK_FORMATS = (RAW, RAW_LATENT)  # the formats of stock layers

# One guard for all caches of a model with the same settings; without a model, for equal configurations.
_guards: WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], Guard]] = WeakKeyDictionary()
_guards_of_configs: dict[tuple[Any, ...], Guard] = {}


def guard_of(
    config: Any, model: Any, settings: KVCacheConfig, calibration: Calibration | None, formats: list[str]
) -> Guard | None:
    """The guard that compares scores once per packed layer; None if it is switched off."""
    if not settings.max_score_error:
        return None
    known = _guards_of_configs if model is None else _guards.setdefault(model, {})
    source = calibration.source if calibration else None
    stored = tuple(formats), settings.seed, settings.center_keys, settings.key_policy, source
    key = ModelIdentity.of(config).hash, settings.max_score_error, *stored
    if key not in known:
        packed = (str(i) for i, name in enumerate(formats) if name not in STOCK_FORMATS)
        known[key] = Guard(settings.max_score_error, packed)
    return known[key]


def seen_keys_of(
    model: Any, settings: KVCacheConfig, calibration: Calibration | None, formats: list[str]
) -> Mapping[int, Tensor]:
    """Mean and first keys of a loaded model, if keys are centred and no calibration provides their offsets."""
    packed = [number for number, name in enumerate(formats) if name not in STOCK_FORMATS and not is_latent_format(name)]
    if model is None or not settings.center_keys or not packed:
        return {}
    if calibration is not None and all(
        number in calibration.layers and calibration.layers[number].key_mean is not None for number in packed
    ):
        return {}
    return seen_keys(model)


def formats_of(settings: KVCacheConfig, calibration: Calibration | None, num_layers: int, latent: bool) -> list[str]:
    """One format per layer."""
    formats = settings.layer_formats(num_layers, latent=latent)
    if settings.memory is not None and settings.format == AUTO and not latent:
        return [RAW] * num_layers
    if CALIBRATED not in formats:
        return formats
    if calibration is None or calibration.formats is None:
        raise InputError(
            f"format={CALIBRATED!r} takes the widths from a calibration made for a budget: run slimkv calibrate with "
            "--budget or --profile, and give the file as calibration"
        )
    chosen = calibration.formats
    return [chosen.get(i, RAW) if name == CALIBRATED else name for i, name in enumerate(formats)]


def check_formats(config: Any, formats: list[str], block_size: int) -> None:
    """Raises for unsupported head sizes now rather than in the first forward pass."""
    text = config.get_text_config(decoder=True)
    try:
        head_dim = getattr(text, "head_dim", None)
    except Exception:  # configs with different layers raise; the error depends on the version
        head_dim = 64
    if head_dim is None and getattr(text, "hidden_size", None) and getattr(text, "num_attention_heads", None):
        head_dim = text.hidden_size // text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None or not isinstance(head_dim, int):
        head_dim = 64  # sizes that differ between K and V or by layer are checked on first use
    for format in dict.fromkeys(formats):
        PageLayout(parse_spec(format, head_dim), block_size)


def config_of(given: Any) -> Any:
    """The config of a model, or the config that was given."""
    config = given.config if isinstance(given, torch.nn.Module) and hasattr(given, "config") else given
    if not hasattr(config, "get_text_config"):
        raise InputError(f"SlimKVCache takes a model or its config, not {type(given).__name__}")
    return config


def attends_encoder(config: Any) -> bool:
    """Whether a decoder caches an encoder's keys; those of BLIP and Whisper may, although their config denies it."""
    kind = config.get_text_config(decoder=True).model_type
    return getattr(config, "is_encoder_decoder", False) or kind in ("blip_text_model", "whisper")


def make_layer(kind: str, arguments: dict[str, Any], format: str, settings: LayerSettings, number: int) -> Any:
    """The packed layer that replaces the stock layer of ``kind``, or the stock layer itself."""
    stock = compat.stock_layer(kind, arguments)
    if type(stock) is compat.DynamicLayer and kind != "cross_attention" and in_tiers(settings.config, format):
        return TieredLayer(format, settings, number)
    if format in STOCK_FORMATS or kind == "cross_attention" or not isinstance(stock, compat.DynamicLayer):
        return stock
    if isinstance(stock, compat.LinearAttentionCacheLayerMixin):
        states = compat.LinearAttentionLayer(**{k: v for k, v in arguments.items() if k != "sliding_window"})
        if "sliding_window" in arguments:
            return PackedHybridSlidingLayer(states, format, settings, arguments["sliding_window"], False, number)
        return PackedHybridLayer(states, format, settings, number)
    if type(stock) is compat.DynamicSlidingWindowLayer:
        return PackedSlidingLayer(format, settings, arguments["sliding_window"], kind == "chunked_attention", number)
    # The stock layer must handle keys and values as a full-attention layer does, whatever other state it keeps.
    methods = ("update", "lazy_initialization", "get_mask_sizes", "get_seq_length", "get_max_length")
    if any(getattr(type(stock), name) is not getattr(compat.DynamicLayer, name) for name in methods):
        return stock
    if type(stock) is not compat.DynamicLayer:
        return PackedIndexedLayer(stock, format, settings, number)
    return PackedLayer(format, settings, number)


def check_deterministic(layers: list[Any]) -> None:
    """Raises for layers whose attention would depend on more than a token's own sequence."""
    for number, layer in enumerate(layers):
        if isinstance(layer, compat.CacheLayerMixin) and type(layer) not in (PackedLayer, PackedHybridLayer):
            raise UnsupportedError(
                f"in transformers, deterministic supports packed layers with full attention, and layer {number} is a "
                f"{type(layer).__name__}; vLLM and SGLang also support sliding windows"
            )


def settings_of(format: object, fields: dict[str, Any]) -> KVCacheConfig:
    """The cache's configuration from the arguments of ``SlimKVCache``."""
    if not isinstance(format, KVCacheConfig):
        return KVCacheConfig.parse({"format": format, **fields})
    if fields:
        raise InputError(f"{', '.join(fields)}: give them inside the KVCacheConfig, or a format and fields, not both")
    return format
