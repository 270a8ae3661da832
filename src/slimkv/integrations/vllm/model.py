"""The model that vLLM serves and its layers: their formats, calibration, key offsets and guard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from slimkv.calibration.guard import Guard
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.config import KVCacheConfig
from slimkv.errors import UnsupportedError
from slimkv.formats import AUTO, CALIBRATED
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.vllm.compat import layer_number, logger, tensor_parallel_rank
from slimkv.integrations.vllm.connectors import pages_leave_the_engine
from slimkv.integrations.vllm.refusals import first_time
from slimkv.integrations.vllm.settings import parse
from slimkv.spec import CodecSpec

_DRAFT_MODEL = "draft_model."  # prefix of a draft model's layers
_DUMMY = "dummy"  # vLLM's load format of random weights
_guards: dict[int, tuple[Any, Guard]] = {}  # by the id of an engine's config, kept alive here


def served_model(vllm_config: Any, settings: KVCacheConfig | None = None) -> ServedModel:
    """The model of an engine's configuration; ``settings`` default to those of its cache.

    ``layers`` and ``calibration`` describe the target model, so they are dropped for a draft model.
    """
    model, settings = vllm_config.model_config, settings or parse(vllm_config.additional_config)
    if _is_draft_models(vllm_config):
        format = AUTO if settings.format == CALIBRATED else settings.format
        settings = replace(settings, format=format, layers={}, calibration=None)
    return ServedModel(
        settings, str(model.model), model.hf_text_config, model.max_model_len,
        tensor_parallel_rank, vllm_config.load_config.load_format == _DUMMY,
    )  # fmt: skip


def _is_draft_models(vllm_config: Any) -> bool:
    """Whether this is the configuration that vLLM derives from the engine's for a separate draft model."""
    speculative, model = getattr(vllm_config, "speculative_config", None), vllm_config.model_config
    return speculative is not None and speculative.draft_model_config is model is not speculative.target_model_config


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
    """The spec of layer ``name``, and its number: None for a drafter's layer, which no calibration covers.

    Layers of a separate draft model have a prefix; other drafters' layers are numbered after the model's. ``dims``: of
    keys and values, or of latents and rope parts.
    """
    number = layer_number(name)
    if name.startswith(_DRAFT_MODEL) and not _is_draft_models(vllm_config):
        number = None
    own = number if number is not None and number < model.config.num_hidden_layers else None
    raw = str(dtype if dtype.is_floating_point else vllm_config.model_config.dtype)
    return model.layer_spec(number, *dims, raw, latent=latent, name=name), own


def layer_offset(
    model: ServedModel, vllm_config: Any, layer: int | None, spec: CodecSpec, held: int, device: torch.device
) -> LayerOffset | None:
    """``ServedModel.layer_offset``; warns once if keys are not centred because pages leave the engine."""
    exchanged = pages_leave_the_engine(vllm_config)
    found = model.layer_offset(layer, spec, held, device, exchanged=exchanged)
    if found is None and exchanged and model.centres(spec) and first_time(vllm_config, "centring"):
        logger.warning(
            "slimkv: keys are not centred, which costs accuracy. Engines that exchange pages must subtract the same "
            "vectors: run slimkv calibrate MODEL once and give every engine the file (calibration)."
        )
    return found


def guard_of(max_score_error: float, vllm_config: Any) -> Guard:
    """The guard that all packed layers of an engine share."""
    return _guards.setdefault(id(vllm_config), (vllm_config, Guard(max_score_error, say=logger.info)))[1]
