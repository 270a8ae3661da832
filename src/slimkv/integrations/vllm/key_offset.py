"""Key offsets in vLLM: engines that exchange pages, and the fidelity guard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.guard import Guard
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.integrations.serving.model import ServedModel, shared_codec
from slimkv.integrations.vllm.compat import logger
from slimkv.integrations.vllm.connectors import pages_leave_the_engine
from slimkv.spec import CodecSpec

_guards: dict[int, tuple[Any, Guard]] = {}  # by the id of an engine's config, which is kept alive
_told: dict[int, Any] = {}  # engines that have logged that their keys are not centred


def layer_offset(
    model: ServedModel, vllm_config: Any, layer: int | None, spec: CodecSpec, held: int, device: torch.device
) -> LayerOffset | None:
    """``ServedModel.layer_offset``; None if keys are not centred. Engines that exchange pages take offsets only from
    the calibration, which they can share.
    """
    if not model.centres(spec):
        return None
    if not pages_leave_the_engine(vllm_config):
        return model.layer_offset(layer, spec, held, device)
    codec = shared_codec(spec, device)
    known = model.calibrated_offset(layer, codec, held)
    if known is not None:
        return LayerOffset(held, codec, known)
    if id(vllm_config) not in _told:
        _told[id(vllm_config)] = vllm_config
        logger.warning(
            "slimkv: keys are not centred, which costs accuracy. Engines that exchange pages must subtract the same "
            "vectors: run slimkv calibrate MODEL once and give every engine the file (calibration)."
        )
    return None


def whole_offset(model: ServedModel, layer: int, spec: CodecSpec) -> Tensor | None:
    """The offset of all KV heads of a layer, on the CPU, in an engine whose pages leave it."""
    known = model.calibration
    if known is None or layer not in known.layers or not model.centres(spec):
        return None
    return known.key_offset(layer, shared_codec(spec, torch.device("cpu")))


def guard_of(max_score_error: float, vllm_config: Any) -> Guard:
    """The guard of an engine's packed layers; one for all of them."""
    return _guards.setdefault(id(vllm_config), (vllm_config, Guard(max_score_error, say=logger.info)))[1]
