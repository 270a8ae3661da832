"""``deterministic``: logits are bitwise equal alone, in a padded batch, in chunks, and one token at a time."""

from __future__ import annotations

import pytest
import torch
from row_exact import exact_linear
from tiny import tiny, tokens

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.transformers import SlimKVCache, attention

LENGTHS = (45, 12, 30)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def exact(monkeypatch):
    exact_linear(monkeypatch.setattr)


def cache_of(model, **fields):
    return SlimKVCache(model, "k4v4", deterministic=True, block_size=16, **fields)


@torch.no_grad()
def last_logits(model, ids, mask=None, cuts=()):
    """The logits of the last token, after passes that end at ``cuts``."""
    cache = cache_of(model)
    with attention(model) as counts:
        for first, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            seen = None if mask is None else mask[:, :end]
            positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, first:end]
            out = model(
                ids[:, first:end], attention_mask=seen, position_ids=positions, past_key_values=cache
            ).logits[:, -1]  # fmt: skip
    assert counts.decoded == counts.plain == 0
    return out


def test_a_prompt_gets_one_answer(model, exact):
    prompts = [tokens(1, count, seed=count) for count in LENGTHS]
    alone = torch.cat([last_logits(model, ids) for ids in prompts])
    longest = max(LENGTHS)
    batch = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - count).long() for count in LENGTHS])
    assert torch.equal(last_logits(model, batch, mask), alone)
    for cuts in ((16, 32), tuple(range(40, 45))):
        assert torch.equal(last_logits(model, prompts[0], cuts=cuts)[0], alone[0]), cuts


def test_without_it_a_chunked_prompt_gets_another(model, exact):
    """Shows that the test above can fail: without the setting, new tokens see one another unquantised."""
    ids = tokens(1, 45, seed=45)
    found = []
    for cuts in ((), (20,)):
        cache = SlimKVCache(model, "k4v4", block_size=16)
        with torch.no_grad(), attention(model):
            for first, end in zip((0, *cuts), (*cuts, 45), strict=True):
                out = model(ids[:, first:end], past_key_values=cache).logits[:, -1]
        found.append(out)
    assert not torch.equal(*found)


@torch.no_grad()
def test_what_it_cannot_do_is_refused_by_name(model):
    with pytest.raises(UnsupportedError, match="layer 0 is a PackedSlidingLayer"):
        cache_of(tiny("gemma3"))
    with pytest.raises(UnsupportedError, match="layer 1 is a DynamicLayer"):
        cache_of(model, layers={1: "raw"})
    ids = tokens(1, 12)
    with pytest.raises(InputError, match="give the model instead of its config"), attention(model):
        model(ids, past_key_values=cache_of(model.config))
    with pytest.raises(UnsupportedError, match="this model's own attention reads decoded keys"):
        model(ids, past_key_values=cache_of(model))
