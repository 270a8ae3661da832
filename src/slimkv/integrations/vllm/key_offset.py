"""The constant part of keys in vLLM: where each layer's offset comes from, and the guard that looks at the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.guard import Guard
from slimkv.calibration.learned_offset import LayerOffset, kept_path
from slimkv.calibration.serving import rank_offset
from slimkv.codec.key_offset import wants_offset
from slimkv.config import KVCacheConfig
from slimkv.integrations.vllm.calibration import load_calibration
from slimkv.integrations.vllm.compat import logger, tensor_parallel_rank
from slimkv.integrations.vllm.connectors import pages_leave_the_engine
from slimkv.spec import CodecSpec

_DUMMY = "dummy"  # vLLM's load format of random weights
_guards: list[tuple[Any, Guard]] = []  # by engine; configurations of vLLM cannot be hashed
_told: list[Any] = []  # engines that were told that their keys are not centred


def layer_offset(
    settings: KVCacheConfig,
    vllm_config: Any,
    layer: int | None,
    spec: CodecSpec,
    num_kv_heads: int,
    device: torch.device,
) -> LayerOffset | None:
    """The offset of a layer's keys on this rank; None where they are not centred.

    From the calibration, else as an earlier process kept it, else learnt from the first prompt. Engines that exchange
    pages take it from the calibration alone, which they can share. ``layer``: its number; None for a drafter's, which
    learns anew in every process.
    """
    if not settings.center_keys or not wants_offset(spec):
        return None
    model, ranks = vllm_config.model_config, tensor_parallel_rank()
    known = _calibrated(settings, model, layer, num_kv_heads, device)
    if known is not None:
        return LayerOffset(num_kv_heads, spec.key_dim, device, known)
    if pages_leave_the_engine(vllm_config):
        _tell(vllm_config)
        return None
    path = None
    if layer is not None and vllm_config.load_config.load_format != _DUMMY:
        path = kept_path(str(model.model), layer, *ranks)
    return LayerOffset.kept(path, num_kv_heads, spec.key_dim, device)


def _calibrated(
    settings: KVCacheConfig, model: Any, layer: int | None, num_kv_heads: int, device: torch.device
) -> Tensor | None:
    calibration = load_calibration(settings, model) if layer is not None else None
    if calibration is None or layer not in calibration.layers:
        return None
    assert layer is not None
    return rank_offset(calibration, layer, num_kv_heads, *tensor_parallel_rank(), device)


def whole_offset(settings: KVCacheConfig, vllm_config: Any, layer: int, spec: CodecSpec) -> Tensor | None:
    """The offset of all KV heads of a layer, on the CPU, in an engine whose pages leave it."""
    calibration = load_calibration(settings, vllm_config.model_config)
    if calibration is None or layer not in calibration.layers or not settings.center_keys or not wants_offset(spec):
        return None
    return calibration.key_offset(layer, torch.device("cpu"))


def _tell(vllm_config: Any) -> None:
    if not any(known is vllm_config for known in _told):
        _told.append(vllm_config)
        logger.warning(
            "slimkv: keys are not centred, which costs accuracy: this engine exchanges pages with others, and all of "
            "them must subtract the same vectors. Run slimkv calibrate MODEL once and give every engine the file "
            "(calibration)."
        )


def guard_of(settings: KVCacheConfig, vllm_config: Any) -> Guard:
    """The guard of an engine's packed layers; one for all of them."""
    for known, guard in _guards:
        if known is vllm_config:
            return guard
    guard = Guard(settings.max_score_error, say=logger.info)
    _guards.append((vllm_config, guard))
    return guard
