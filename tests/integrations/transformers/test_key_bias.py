"""Keys with a large constant part: four bits must keep what tells keys apart, in every family that has biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from key_bias import BIAS_NORM, FAMILIES, HEAD_DIM, biased_model
from tiny import tokens
from torch import Tensor
from transformers import DynamicCache


def logits(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].double()


def stock_logits(model: Any, ids: Tensor) -> Tensor:
    return logits(model, ids, DynamicCache(config=model.config.get_text_config()))


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean KL divergence over positions, in nats."""
    p, q = expected.log_softmax(-1), actual.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bias_is_a_constant_of_the_stored_keys(name):
    """The models are what they are meant to be: most of every key is one vector, and attention does not see it."""
    ids = tokens(1, 64)
    runs = []
    for bias in (True, False):
        model = biased_model(name, bias)
        cache = DynamicCache(config=model.config.get_text_config())
        runs.append((logits(model, ids, cache), [layer.keys[0] for layer in cache.layers]))
    (with_bias, keys), (without, _) = runs
    for key in keys:
        mean = key.mean(1)
        assert key.shape[-1] == HEAD_DIM
        torch.testing.assert_close(mean.norm(dim=-1), torch.full((len(mean),), BIAS_NORM), rtol=0.05, atol=0)
        assert float((key - mean[:, None]).norm(dim=-1).max()) < 0.2 * BIAS_NORM
    if name != "gpt_oss":  # its sinks are compared with the scores
        assert divergence(without, with_bias) < 0.05
