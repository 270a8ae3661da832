"""Keys with a large constant part: four bits must preserve their differences, in every model family with biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from key_bias import BIAS_NORM, FAMILIES, HEAD_DIM, HEALTHY, biased_model
from tiny import tokens
from torch import Tensor
from transformers import DynamicCache

import slimkv
from slimkv.errors import FidelityError

SOURCES = ("model", "first tokens")  # source of the key offset: a pass of random ids, or the first stored tokens


def logits(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].double()


def stock_logits(model: Any, ids: Tensor) -> Tensor:
    return logits(model, ids, DynamicCache(config=model.config.get_text_config()))


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean KL divergence over positions, in nats."""
    p, q = expected.log_softmax(-1), actual.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def packed_logits(model: Any, ids: Tensor, source: str | None, fused: bool) -> Tensor:
    """Logits with every token read through 4-bit codes. With ``source`` None, keys are not centred."""
    subject = model if source == "model" else model.config
    cache = slimkv.SlimKVCache(subject, "k4v4", fresh="codes", block_size=16, center_keys=source is not None)
    if not fused:
        return logits(model, ids, cache)
    with slimkv.attention(model):
        return logits(model, ids, cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bias_is_a_constant_of_the_stored_keys(name):
    """Checks the test models: a constant vector dominates every key, and softmax cancels its effect."""
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
    if name != "gpt_oss":  # scores compete with sinks, so a constant shift changes the result
        assert divergence(without, with_bias) < 0.05


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keeps the key offsets of these models out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:the attention of Falcon")
def test_four_bits_keep_the_predictions_of_a_biased_model(name):
    model, ids = biased_model(name), tokens(1, 64)
    expected = stock_logits(model, ids)
    uncentred = divergence(expected, packed_logits(model, ids, None, fused=True))
    assert uncentred > 0.1  # these models need centring
    for source in SOURCES:
        decoded, fused = (packed_logits(model, ids, source, fused) for fused in (False, True))
        centred = divergence(expected, fused)
        assert centred < min(0.05, uncentred / 10), f"{source}: {centred:.4f}, without {uncentred:.4f}"
        assert divergence(decoded, fused) < 1e-4  # soft caps and sinks see the same scores


@pytest.mark.parametrize("name", HEALTHY)
def test_centring_does_not_harm_a_healthy_model(name):
    model, ids = biased_model(name), tokens(1, 64)
    expected = stock_logits(model, ids)
    uncentred = divergence(expected, packed_logits(model, ids, None, fused=True))
    for source in SOURCES:
        decoded, fused = (packed_logits(model, ids, source, fused) for fused in (False, True))
        centred = divergence(expected, fused)
        assert centred < min(0.05, 1.2 * uncentred), f"{source}: {centred:.4f}, without {uncentred:.4f}"
        assert divergence(decoded, fused) < 1e-4  # soft caps and sinks see the same scores


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_enable_centres_without_being_asked(name):
    model, ids = biased_model(name), tokens(1, 40)
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids)
    stock = model.generate(ids, attention_mask=mask, **options)
    found = {}
    for centred in (True, False):
        given = {} if centred else {"center_keys": False}
        slimkv.enable(model, "k4v4", **given)
        packed = model.generate(ids, attention_mask=mask, **options)
        slimkv.disable(model)
        same = stock.sequences[0] == packed.sequences[0]
        until = int(same.long().cumprod(0).sum()) - ids.shape[1] + 1  # compare logits only while contexts are equal
        pairs = zip(stock.logits[:until], packed.logits[:until], strict=True)
        found[centred] = sum(divergence(a.double(), b.double()) for a, b in pairs) / len(stock.logits[:until])
    assert found[True] < 0.05 < found[False], found


def test_the_guard_compares_every_model_until_it_is_healthy():
    """It checks models of one configuration with different weights separately, and stops the second prompt, too."""
    name, ids = next(iter(FAMILIES)), tokens(1, 300)
    healthy, biased = biased_model(name, False), biased_model(name, True)
    for model in (healthy, biased):
        slimkv.enable(model, "k4v4", center_keys=False, max_score_error=1.0)
    assert healthy.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == 302
    for _ in range(2):
        with pytest.raises(FidelityError, match="differ from exact ones"):
            biased.generate(ids, max_new_tokens=2, do_sample=False)
