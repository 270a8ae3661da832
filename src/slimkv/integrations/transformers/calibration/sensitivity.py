"""How sensitive a model's predictions are to noise in the attention of one layer, measured by adding noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimkv.integrations.transformers.calibration.samples import Progress
from slimkv.integrations.transformers.plugin import observed_attention
from slimkv.integrations.transformers.stock_attention import layer_number

NOISE = 0.1  # relative to the attention output: small enough for a linear response, large enough to measure


def layer_gains(model: Any, ids: Tensor, layers: Sequence[int], progress: Progress) -> dict[int, float]:
    """KL divergence of predictions per relative squared error of a layer's attention output, for each of ``layers``.

    The model reads ids int64 [1, tokens] once unchanged and once per layer, with white noise in that layer's output
    before the output projection.
    """
    noisy: list[int] = []

    def add_noise(out: Tensor, module: Any, *_: Any, **__: Any) -> Tensor:
        if layer_number(module) not in noisy:
            return out
        generator = torch.Generator(device=out.device).manual_seed(layer_number(module))
        noise = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
        size = out.float().square().mean((-2, -1), keepdim=True).sqrt()  # of each token
        return (out.float() + NOISE * size * noise).to(out.dtype)

    gains = {}
    with observed_attention(model, add_noise), torch.no_grad():
        base = _log_probabilities(model, ids)
        for number, layer in enumerate(layers):
            progress("sensitivity of layers", number, len(layers))
            noisy[:] = [layer]
            other = _log_probabilities(model, ids)
            gains[layer] = max(float((base.exp() * (base - other)).sum(-1).mean()), 0.0) / NOISE**2
    return gains


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids, use_cache=False).logits[0].float(), -1)
