"""Which layer an implementation belongs to, and the format that the settings give it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from slimkv.calibration.serving import chosen_format
from slimkv.codec import Codec
from slimkv.config import CALIBRATED, KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm.calibration import load_calibration
from slimkv.integrations.vllm.compat import layer_number
from slimkv.spec import CodecSpec, parse_spec


@lru_cache(maxsize=64)
def shared_codec(spec: CodecSpec, device: torch.device) -> Codec:
    """Layers with the same formats share their tables."""
    return Codec(spec, device)


def find_layer(vllm_config: Any, impl: Any) -> tuple[str, Any]:
    """The name and module of the layer that ``impl`` runs."""
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if getattr(layer, "impl", None) is impl:
            return name, layer
    raise UnsupportedError("vLLM does not list the layer of this attention, so that its format is not known")


def layer_spec(
    settings: KVCacheConfig,
    vllm_config: Any,
    name: str,
    key_dim: int,
    value_dim: int | None,
    act_dtype: torch.dtype,
    *,
    latent: bool = False,
) -> tuple[CodecSpec, int | None]:
    """What the layer ``name`` stores, and its number; None for a drafter's layer, which no calibration knows.

    A drafter's layers are numbered from behind the model's. ``latent``: the layer caches latents of ``key_dim`` numbers
    with rope parts of ``value_dim``.
    """
    layers_in_model = vllm_config.model_config.hf_text_config.num_hidden_layers
    settings.check_layers(layers_in_model)
    number = layer_number(name)
    own = number if number is not None and number < layers_in_model else None
    format = settings.format_of(number, layers_in_model, latent=latent)
    if format == CALIBRATED:
        calibration = load_calibration(settings, vllm_config.model_config)
        if own is None or calibration is None:
            raise InputError(f"slimkv: the calibration knows no layer {name}; give its format by name")
        format = chosen_format(calibration, own)
    dtype = str(act_dtype if act_dtype.is_floating_point else vllm_config.model_config.dtype)
    spec = parse_spec(
        format,
        key_dim,
        value_dim,
        key_policy=settings.key_policy,
        value_policy=settings.value_policy,
        seed=settings.seed,
    )
    return spec.with_raw_dtype(dtype.removeprefix("torch.")), own
