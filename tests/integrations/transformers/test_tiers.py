"""Tokens in several formats by age: memory budgets hold, and attention over tiers equals attention over all tokens."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from tests.integrations.transformers.tiny import generate, padded, tiny, tokens
from transformers import DynamicCache

import slimkv
from slimkv.errors import InputError, OutOfPagesError, UnsupportedError
from slimkv.integrations.transformers.ladder import RUNGS, SINK_TOKENS
from slimkv.integrations.transformers.tiers import TieredLayer
from tail import sample

BF16_TOKEN = 3 * 2 * 2 * 32 * 2  # layers, K and V, heads, head size and bytes of the tiny llama


@torch.no_grad()
def read(model, cache, ids, fused=True, **more):
    if not fused:
        return model(ids, past_key_values=cache, **more).logits
    with slimkv.attention(model):
        return model(ids, past_key_values=cache, **more).logits


def lengths(cache):
    return [x.tokens for x in cache.layers[0].ladder.tables]


PASSES = {"one": [300], "mixed": [40, 1, 1, 90, 60, 3, 100], "single": [100, *[1] * 40]}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("fresh", ["auto", "codes"])
def test_a_budget_is_never_exceeded_and_is_used(passes, fresh):
    model, memory = tiny(), 250 * BF16_TOKEN
    cache = slimkv.SlimKVCache(model.config, memory=memory, block_size=16, fresh=fresh)
    ids, seen = tokens(2, sum(passes)), 0
    for count in passes:
        read(model, cache, ids[:, seen : seen + count])
        seen += count
        assert cache.nbytes <= memory
        sink = cache.layers[0].ladder.sink_tokens
        assert 0 < sink <= SINK_TOKENS
        assert sum(lengths(cache)) + sink == max(seen, sink)
        for layer in cache.layers:
            held = sum(tier.pool.pages.shape[0] for tier in layer.tiers if tier.is_initialized)
            assert held == sum(x.blocks for x in layer.ladder.tables)
    if seen > 140:  # the unused memory is too small for a block in a wider format
        assert cache.nbytes > memory - 4 * 16 * BF16_TOKEN
        assert sum(n > 0 for n in lengths(cache)) > 1


def test_a_cache_starts_at_the_widest_format_and_is_exact_there():
    model, ids = tiny(), tokens(1, 90)
    cache = slimkv.SlimKVCache(model.config, memory=400 * BF16_TOKEN, block_size=16)
    stock = DynamicCache(config=model.config)
    for part in (ids[:, :50], ids[:, 50:51], ids[:, 51:90]):
        expected = read(model, stock, part, fused=False)
        torch.testing.assert_close(read(model, cache, part), expected, rtol=0, atol=1e-4)
    assert lengths(cache)[:-1] == [0] * (len(RUNGS) - 1)


@pytest.mark.parametrize("kind", ["llama", "mha"])
@pytest.mark.parametrize("fresh", ["auto", "codes"])
@pytest.mark.parametrize(
    "options",
    [{"memory": 130 * BF16_TOKEN}, {"format": "k8v8", "age": {20: "k6v6", 70: "k4v4"}}],
    ids=["memory", "age"],
)
def test_attention_over_tiers_is_that_over_decoded_tokens(kind, fresh, options):
    """Even after crops into a tier and changes of the batch."""
    model, ids, runs = tiny(kind, layers=1), tokens(2, 400), []  # codes of deeper layers amplify the last bit
    for fused in (False, True):
        cache = slimkv.SlimKVCache(model.config, block_size=16, fresh=fresh, **options)
        logits, batch = [], ids
        for first, count in ((0, 150), (150, 1), (151, 5), (156, 40), (196, 1)):
            logits.append(read(model, cache, batch[:, first : first + count], fused))
        cache.crop(-77)
        for first, count in ((0, 1), (1, 50), (60, 3), (70, 90)):
            logits.append(read(model, cache, batch[:, first : first + count], fused))
        cache.batch_select_indices([1])
        cache.batch_repeat_interleave(3)
        logits.append(read(model, cache, ids[:1, :4].expand(3, -1), fused))
        assert sum(n > 0 for n in lengths(cache)) > 1
        if "memory" in options:
            assert cache.nbytes <= options["memory"]
        runs.append(torch.cat([x.flatten() for x in logits]))
    torch.testing.assert_close(*runs, rtol=0, atol=1e-4 * float(runs[0].abs().max()))


def test_ages_say_where_tokens_are():
    model = tiny()
    cache = slimkv.SlimKVCache(model.config, "raw", age={20: "k8v8", 100: "k4v4"}, block_size=16, sink_tokens=4)
    seen = 0
    for count in (70, 1, 60, 1, 1, 100):
        read(model, cache, tokens(1, count))
        seen += count
        oldest, middle, newest = lengths(cache)
        assert 20 <= newest < 20 + 16
        assert oldest + middle + newest == seen - 4
        if oldest:
            assert 100 <= middle + newest < 100 + 16
        else:
            assert middle + newest < 100 + 16
    assert "raw to k4v4" in repr(cache)


def test_older_tokens_are_coarser_and_first_and_last_are_fine():
    model, ids = tiny(), tokens(1, 300)
    cache, stock = slimkv.SlimKVCache(model.config, memory=150 * BF16_TOKEN, block_size=16), DynamicCache()
    for one in (cache, stock):
        read(model, one, ids, fused=False)
    wrong = (cache.layers[0].keys - stock.layers[0].keys).square().mean((0, 1, 3))
    sink = cache.layers[0].ladder.sink_tokens
    assert wrong[:sink].max() == 0
    assert max(wrong[-8:].mean(), wrong[-64:].mean()) < wrong[sink:80].mean()


def test_what_does_not_fit_is_refused_and_nothing_is_lost():
    model = tiny()
    cache = slimkv.SlimKVCache(model.config, memory=100 * BF16_TOKEN, block_size=16)
    ids = tokens(1, 300)
    read(model, cache, ids[:, :100])
    twin = copy.deepcopy(cache)
    with pytest.raises(OutOfPagesError, match=r"cannot hold 1 sequences of 2,100 tokens, not even as k2v2"):
        read(model, cache, tokens(1, 2000))
    assert cache.get_seq_length() == 100
    torch.testing.assert_close(read(model, cache, ids[:, 100:]), read(model, twin, ids[:, 100:]), rtol=0, atol=0)
    with pytest.raises(OutOfPagesError, match="16 sequences"):
        cache.batch_repeat_interleave(16)
    with pytest.raises(InputError, match="reset the cache"):
        read(model, cache, ids[:, :1])


WAYS = {"greedy": {}, "beam": {"num_beams": 3}, "assisted": {"prompt_lookup_num_tokens": 4}}


@pytest.mark.parametrize(("fused", "way"), sample(product((True, False), WAYS), 2))
def test_generate(fused, way):
    """Lossless formats give the stock cache's tokens. Prompts are left-padded, except for prompt lookup."""
    model, (ids, mask), how = tiny(), padded(40), WAYS[way]
    if "prompt_lookup_num_tokens" in how:
        ids, mask = ids[1:2], mask[1:2]
    options = {"format": "krawfp32vrawfp32", "age": {20: "raw", 40: "krawfp32vrawfp32"}, "block_size": 16}
    expected = generate(model, ids, mask, DynamicCache(config=model.config), new=30, **how)
    cache = slimkv.SlimKVCache(model.config, **options)
    if fused:
        with slimkv.attention(model):
            actual = generate(model, ids, mask, cache, new=30, **how)
    else:
        actual = generate(model, ids, mask, cache, new=30, **how)
    assert torch.equal(actual.sequences, expected.sequences)
    assert min(lengths(cache)) > 0


def test_enable_takes_a_budget_and_generate_keeps_it():
    model = slimkv.enable(tiny(), memory="75KiB", block_size=16)
    ids = tokens(1, 60)
    out = model.generate(ids, max_new_tokens=100, do_sample=False)
    assert out.shape[1] == 160
    status = slimkv.status(model)
    assert status.size.allocated_bytes <= 75 * 1024
    assert status.size.bf16_bytes > 75 * 1024
    assert "raw to k2v2" in str(status)
    slimkv.disable(model)


def test_key_offsets_and_matrices_go_with_every_tier():
    from slimkv.integrations.transformers.calibration.collect import gather_calibration

    model = tiny()
    known = gather_calibration(model, tokens(2, 128), costs=False)
    cache = slimkv.SlimKVCache(model, memory=100 * BF16_TOKEN, block_size=16, calibration=known)
    read(model, cache, tokens(1, 250))
    packed = [x for x in cache.layers[0].tiers if x.is_initialized and "raw" not in x.format]
    assert len(packed) > 1
    for tier in packed:
        assert tier.pool.query_aware is not None
        assert torch.equal(tier.pool.key_offset, known.key_offset(0, tier.pool.codec))


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("gemma3", {"memory": "1MiB"}, UnsupportedError, "layer 0 of this one has sliding_attention"),
        ("qwen3_next", {"memory": "1MiB"}, UnsupportedError, "full attention"),
        ("llama", {"memory": "1MiB", "offloading": True}, UnsupportedError, "offloading"),
        ("llama", {"memory": "1MiB", "age": {5: "k4v4"}}, InputError, "choose one"),
        ("llama", {"memory": "1MiB", "layers": {0: "k4v4"}}, InputError, "choose one"),
        ("llama", {"memory": 0, "layers": {0: "k4v4"}}, InputError, "choose one"),
        ("llama", {"memory": "some"}, InputError, "memory size 'some'"),
        ("llama", {"memory": "1MiB", "prefill": "8bit"}, InputError, "memory=1048576"),
        ("llama", {"age": {0: "k4v4"}}, InputError, "number of tokens"),
        ("llama", {"age": {5: "k9v9"}}, slimkv.SlimKVError, "k9v9"),
        ("llama", {"age": {5: "k4v4"}, "recent_tokens": 8}, InputError, "recent_tokens=8"),
        ("llama", {"age": ["k4v4"]}, InputError, "must map ages"),
    ],
)
def test_refusals(kind, options, error, message):
    with pytest.raises(error, match=message):
        slimkv.SlimKVCache(tiny(kind).config, **options)


def test_sliding_layers_beside_tiers():
    model, ids = tiny("gemma3"), tokens(1, 200)
    cache = slimkv.SlimKVCache(model.config, "k8v8", age={40: "k4v4"}, block_size=16)
    for first in range(0, 200, 50):
        read(model, cache, ids[:, first : first + 50])
    tiered = [x for x in cache.layers if isinstance(x, TieredLayer)]
    assert len(tiered) == 1
    assert min(x.tokens for x in tiered[0].ladder.tables) > 0
