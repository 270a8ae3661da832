"""The layer of an attention implementation, and its format."""

from __future__ import annotations

from typing import Any

import torch

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.vllm.compat import layer_number
from slimkv.spec import CodecSpec


def find_layer(vllm_config: Any, impl: Any) -> tuple[str, Any]:
    """The name and module of the layer that ``impl`` runs."""
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if getattr(layer, "impl", None) is impl:
            return name, layer
    raise UnsupportedError("vLLM does not list the layer of this attention, so slimkv cannot find its format")


def layer_spec(
    model: ServedModel,
    vllm_config: Any,
    name: str,
    dims: tuple[int, int | None],
    dtype: torch.dtype,
    latent: bool = False,
) -> tuple[CodecSpec, int | None]:
    """The spec of layer ``name``, and its number; None for a drafter's layer, which is in no calibration. A drafter's
    layers are numbered after the model's layers. ``dims``: of keys and values, or of latents and rope parts.
    """
    number = layer_number(name)
    own = number if number is not None and number < model.config.num_hidden_layers else None
    raw = str(dtype if dtype.is_floating_point else vllm_config.model_config.dtype)
    return model.layer_spec(number, *dims, raw, latent=latent, name=name), own
