"""The error that quantised keys cause in the attention scores of each layer: the guard's figure, on any tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.guard import score_errors
from slimkv.integrations.transformers.cache import SlimKVCache
from slimkv.integrations.transformers.calibration.offsets import TOKENS
from slimkv.integrations.transformers.calibration.samples import random_window
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.plugin import observed_attention
from slimkv.integrations.transformers.stock_attention import layer_number


def layer_score_errors(model: Any, cache: SlimKVCache, ids: Tensor | None = None) -> dict[int, float]:
    """The noise in the scores of each packed layer, in nats, for its worst KV head.

    Args:
        cache: an empty cache of the model, with the formats to measure; it is filled.
        ids: int64 [1, tokens] that the model reads; by default random ones.
    """
    found: dict[int, float] = {}

    def observe(out: Tensor, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        number = layer_number(module)
        layer = cache.layers[number] if number < len(cache.layers) else None
        if isinstance(layer, PackedLayer) and number not in found:
            layer.update(key, value)
            states = layer.keys
            assert states is not None
            stored = states.decoded()
            tokens = stored.shape[2]  # those that a sliding layer still holds
            queries, keys, kept = (x[0, :, -tokens:].transpose(0, 1) for x in (query, key, stored))
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            found[number] = float(score_errors(queries, keys, kept, scale).max())
        return out

    if ids is None:
        ids = random_window(model.config, TOKENS)
    with observed_attention(model, observe), torch.no_grad():
        model(ids[:1].to(model.device), use_cache=False)
    return dict(sorted(found.items()))
