"""Generation modes that change the batch or remove tokens from the cache."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny import LOSSLESS, generate, padded, tiny, tokens
from transformers import DynamicCache

import slimkv
from tail import sample

WAYS = {
    "beams": {"num_beams": 3},
    "beam group returned": {"num_beams": 4, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}


@pytest.mark.parametrize(
    ("fused", "kind", "way"), sample(product((False, True), ("llama", "gemma3", "mistral"), WAYS), 2)
)
def test_batch_changing_generation_equals_stock(way, kind, fused):
    model = tiny(kind)
    ids, mask = padded(40)
    torch.manual_seed(1)
    stock = generate(model, ids, mask, DynamicCache(config=model.config), new=12, **WAYS[way])
    torch.manual_seed(1)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes", block_size=16)
    if fused:
        with slimkv.attention(model):
            packed = generate(model, ids, mask, cache, new=12, **WAYS[way])
    else:
        packed = generate(model, ids, mask, cache, new=12, **WAYS[way])
    assert torch.equal(packed.sequences, stock.sequences)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("fused", [False, True])
def test_prompt_lookup_goes_back(kind, fused):
    """Rejected drafts are cropped from the cache. The tokens must be those of plain greedy generation."""
    model = tiny(kind)
    ids = tokens(1, 20).repeat(1, 3)  # repetitive, so that drafts are found
    mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, DynamicCache(config=model.config), new=20)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes", block_size=16)
    if fused:
        with slimkv.attention(model):
            actual = generate(model, ids, mask, cache, new=20, prompt_lookup_num_tokens=4)
    else:
        actual = generate(model, ids, mask, cache, new=20, prompt_lookup_num_tokens=4)
    assert torch.equal(actual.sequences, expected.sequences)


def test_assisted_generation():
    model = tiny("llama")
    ids = tokens(1, 30)
    mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, DynamicCache(config=model.config), new=16)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes")
    actual = generate(model, ids, mask, cache, new=16, assistant_model=tiny("llama"))
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_cache_reuse_across_turns(kind):
    model = tiny(kind)
    first, second = tokens(1, 30), tokens(1, 12, seed=5)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, block_size=16)
    stock = DynamicCache(config=model.config)
    histories = []
    with slimkv.attention(model):
        for held in (stock, cache):
            ids = generate(model, first, torch.ones_like(first), held, new=8).sequences
            ids = torch.cat([ids, second], 1)
            histories.append(generate(model, ids, torch.ones_like(ids), held, new=8).sequences)
    assert torch.equal(*histories)
    assert cache.get_seq_length() == stock.get_seq_length() == histories[0].shape[1] - 1


def test_speculation_does_not_change_packed_text():
    """Verification of several tokens reads the same codes as decoding one by one, even if prefill is unquantised."""
    model = tiny("llama")
    ids = tokens(1, 20).repeat(1, 3)
    mask = torch.ones_like(ids)
    with slimkv.attention(model):
        # Made from the model, not its config: an offset learnt from the first pass would depend on the drafts in it.
        plain = generate(model, ids, mask, slimkv.SlimKVCache(model, "k4v4"), new=20)
        drafted = generate(model, ids, mask, slimkv.SlimKVCache(model, "k4v4"), new=20, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, drafted.sequences)
