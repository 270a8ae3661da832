"""Mean and first keys of a loaded model: from a pass over random ids, run once and saved under the model's digest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slimkv.calibration import file
from slimkv.calibration.learned_offset import FORMAT
from slimkv.integrations.transformers.calibration.cached import fingerprint, load_or_make
from slimkv.integrations.transformers.calibration.samples import random_window
from slimkv.integrations.transformers.compat import DynamicCache, EncoderDecoderCache
from slimkv.paths import cache_dir

TOKENS = 256
_NAME = "keys"
_LOG = logging.getLogger("slimkv")
_known: WeakKeyDictionary[torch.nn.Module, Mapping[int, Tensor]] = WeakKeyDictionary()


def seen_keys(model: torch.nn.Module, folder: Path | None = None) -> Mapping[int, Tensor]:
    """Mean key and first key of every cache layer: float32 [2, num_kv_heads, key_dim] on the CPU, by layer number.

    Each codec computes its offsets from them. They come from memory, from ``folder`` (by default slimkv's cache
    directory), or from a pass of ``TOKENS`` random ids. Empty for a model that cannot read plain ids, which learns its
    offsets from the first prompt.
    """
    if model not in _known:
        folder = folder if folder is not None else cache_dir("offsets")
        path = folder / f"{fingerprint(model)}.safetensors"
        _known[model] = load_or_make(path, _load, lambda: _make(model, path))
    return _known[model]


def _load(path: Path) -> Mapping[int, Tensor]:
    _, tensors = file.read(path, FORMAT)
    return {int(name.removeprefix(f"{_NAME}.")): tensor for name, tensor in tensors.items()}


def _make(model: Any, path: Path) -> Mapping[int, Tensor]:
    found = keys_of_pass(model)
    if found:
        file.write(path, {}, {f"{_NAME}.{number}": keys for number, keys in found.items()}, FORMAT)
    return found


def keys_of_pass(model: Any) -> dict[int, Tensor]:
    """The result of ``seen_keys``, from a pass of ``TOKENS`` random ids; empty if the model does not take plain ids."""
    if any(x.is_meta for x in model.parameters()):
        return {}
    text = model.config.get_text_config(decoder=True)
    training = model.training
    try:
        ids = random_window(model.config, TOKENS).to(model.device)
        cache: Any = DynamicCache(config=text)
        arguments = {"input_ids": ids}
        if getattr(model.config, "is_encoder_decoder", False):
            cache = EncoderDecoderCache(cache, DynamicCache(config=text))
            arguments["decoder_input_ids"] = ids
        with torch.no_grad():
            model.eval()
            model(**arguments, past_key_values=cache, use_cache=True)
    except Exception as error:  # a model that needs more than ids; each class raises another error
        _LOG.info(
            "slimkv learns key offsets from the first prompt: %s does not read plain ids (%r)", type(model), error
        )
        return {}
    finally:
        model.train(training)
    layers = getattr(cache, "self_attention_cache", cache).layers
    keys = {number: getattr(layer, "keys", None) for number, layer in enumerate(layers)}
    return {
        number: torch.stack([x.float().mean((0, 2)), x[:, :, 0].float().mean(0)]).cpu()
        for number, x in keys.items()
        if isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] and bool(x.isfinite().all())
    }
