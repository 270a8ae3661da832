"""The cache object: contents, moving, memory, options and refusals."""

from __future__ import annotations

import pytest
import torch
from tiny import LOSSLESS, tiny, tokens
from transformers import Cache, DynamicCache

import slimkv
from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.lazy_kv import PackedStates
from slimkv.integrations.transformers.sliding import PackedSlidingLayer
from slimkv.spec import CodecSpec, PageLayout

HEADS, DIM = 2, 32


def states(batch: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, HEADS, count, DIM, generator=generator).to(dtype) for _ in range(2))


def filled(format: str = LOSSLESS, batch: int = 2, count: int = 40, kind: str = "llama", **options):
    """A packed cache and a stock cache that hold the same tokens in every layer."""
    config = tiny(kind).config
    cache = slimkv.SlimKVCache(config, format, block_size=16, fresh="auto" if options else "codes", **options)
    stock = DynamicCache(config=config)
    for index in range(len(cache.layers)):
        cache.update(*states(batch, count, index), index)
        stock.update(*states(batch, count, index), index)
    return cache, stock


def extend(cache, stock, batch: int, count: int, seed: int = 9):
    """Updates both caches with the same new tokens and returns the states that attention would read."""
    pairs = []
    for index in range(len(cache.layers)):
        ours = cache.update(*states(batch, count, seed + index), index)
        theirs = stock.update(*states(batch, count, seed + index), index)
        pairs.append((ours, theirs))
    return pairs


def assert_same(pairs):
    for ours, theirs in pairs:
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a + 0, b)  # any operation decodes


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_update_returns_what_the_stock_cache_returns(kind):
    cache, stock = filled(kind=kind)
    assert isinstance(cache, Cache)
    for count in (1, 3, 30, 1):
        pairs = extend(cache, stock, 2, count, seed=count)
        assert all(isinstance(ours[0], PackedStates) for ours, _ in pairs)
        assert_same(pairs)
        assert cache.get_seq_length() == stock.get_seq_length()
        for index in range(3):
            assert cache.get_mask_sizes(5, index) == stock.get_mask_sizes(5, index)
    assert cache.is_sliding == stock.is_sliding


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.reorder_cache(torch.tensor([1, 1])),
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.batch_select_indices(torch.tensor([1])),
        lambda c: (c.batch_repeat_interleave(2), c.batch_select_indices(torch.tensor([0, 3]))),
    ],
    ids=["reorder", "repeat", "select", "repeat and select"],
)
def test_batch_changes(kind, change):
    cache, stock = filled(kind=kind)
    change(cache), change(stock)
    batch = stock.layers[0].keys.shape[0]
    assert_same(extend(cache, stock, batch, 1))
    assert_same(extend(cache, stock, batch, 20, seed=30))


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_and_values_may_have_any_strides(batch):
    """Inkling's keys come out of a convolution, with the tokens innermost."""
    cache, stock = slimkv.SlimKVCache(tiny().config, LOSSLESS, fresh="codes"), DynamicCache(config=tiny().config)
    for count in (12, 1):
        pair = [x.mT.contiguous().mT for x in states(batch, count)]
        assert_same([(cache.update(*pair, 0), stock.update(*pair, 0))])


def test_crop_full():
    cache, stock = filled()
    for remove, add in ((-7, 3), (-20, 12), (0, 1)):
        cache.crop(remove), stock.crop(remove)
        assert cache.get_seq_length() == stock.get_seq_length()
        assert_same(extend(cache, stock, 2, add))


def test_crop_sliding_needs_recording():
    cache, stock = filled(kind="gemma3")
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-3)
    cache, stock = filled(kind="gemma3")
    cache.activate_past_recording(), stock.activate_past_recording()
    for remove, add in ((0, 6), (-4, 5), (-5, 6), (0, 4), (-1, 1)):
        assert_same(extend(cache, stock, 2, add, seed=add))
        cache.crop(remove), stock.crop(remove)
        assert cache.get_seq_length() == stock.get_seq_length()
    assert_same(extend(cache, stock, 2, 1))
    with pytest.raises(RuntimeError, match="cannot remove 9"):
        cache.crop(-9)


def test_reset_frees_and_allows_another_batch():
    cache, _ = filled()
    assert cache.nbytes > 0
    cache.reset()
    assert cache.nbytes == 0
    assert cache.get_seq_length() == 0
    stock = DynamicCache(config=tiny().config)
    assert_same(extend(cache, stock, 3, 4))


def test_early_initialization_then_use():
    config = tiny().config
    cache, stock = slimkv.SlimKVCache(config, LOSSLESS, fresh="codes"), DynamicCache(config=config)
    cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    assert_same(extend(cache, stock, 2, 5))


def test_offload_and_prefetch_keep_the_tokens():
    cache, stock = filled()
    for layer in cache.layers:
        layer.offload()
        assert layer.pool.pages.device.type == "cpu"
        layer.prefetch()
        assert layer.pool.pages.device == layer.device
    assert_same(extend(cache, stock, 2, 1))


def test_keys_and_values_can_be_looked_at():
    cache, stock = filled()
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.keys + 0, theirs.keys)
        assert torch.equal(ours.values + 0, theirs.values)
        with pytest.raises(UnsupportedError, match=r"mul_ writes to keys or values"):
            ours.values.mul_(2)
    held = cache.layers[0].keys
    cache.layers[0].update(*states(2, 1))
    with pytest.raises(InputError, match="moved on"):
        held + 0


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["k4v4", "k3v3", "turboquant_k8v4", "k5v4"])
@pytest.mark.parametrize("count", [64, 1000])
def test_memory_is_what_the_layout_says(format, count):
    cache, stock = filled(format, batch=3, count=count)
    layout = PageLayout(CodecSpec.parse(format, DIM), 16)
    arithmetic = 3 * layout.pool_bytes(layout.blocks_for(count) * 3, HEADS)
    storages = {layer.pool.pages.untyped_storage().data_ptr(): layer.pool.pages for layer in cache.layers}
    allocated = sum(pages.untyped_storage().nbytes() for pages in storages.values())
    assert cache.nbytes == allocated == arithmetic
    plain = sum(t.numel() * t.element_size() for layer in stock.layers for t in (layer.keys, layer.values))
    assert cache.size().bf16_bytes == plain // 2
    assert allocated < plain / 2 / layout.compression_ratio * (layout.blocks_for(count) * 16 / count) * 1.0001


def test_growing_wastes_little():
    cache = slimkv.SlimKVCache(tiny().config, "k4v4", block_size=16)
    layout = PageLayout(CodecSpec.parse("k4v4", DIM), 16)
    for _ in range(150):
        cache.update(*states(1, 9), 0)
        exact = layout.pool_bytes(layout.blocks_for(cache.get_seq_length()), HEADS)
        assert exact <= cache.nbytes <= exact * 33 / 32 + layout.page_bytes * HEADS


@pytest.mark.parametrize("strict", [False, True])
def test_a_window_forgets(strict):
    cache = slimkv.SlimKVCache(tiny("mistral").config, "k4v4", block_size=16, fresh="codes" if strict else "raw")
    for count in (200, 1, 1, 1, 40, 1, 1):
        cache.update(*states(1, count), 0)
    layout = PageLayout(CodecSpec.parse("k4v4", DIM), 16)
    assert cache.nbytes <= layout.pool_bytes(layout.blocks_for(24) + 4, HEADS)
    assert cache.get_seq_length() == 245


# -- options ---------------------------------------------------------------------------------------------------------


def test_formats_by_layer():
    config = tiny("gemma3").config
    cache = slimkv.SlimKVCache(config, layers={0: "raw", -1: "k8v8", "default": "k4v4"})
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[1:] == [PackedLayer, PackedSlidingLayer]
    assert not isinstance(cache.layers[0], PackedLayer)
    assert [layer.format for layer in cache.layers[1:]] == ["k4v4", "k8v8"]
    with pytest.raises(InputError, match="layers names 7"):
        slimkv.SlimKVCache(config, layers={7: "raw", "default": "k4v4"})


@pytest.mark.parametrize("count", [5, 12, 40])
def test_a_high_precision_window_is_exact_and_the_rest_is_not(count):
    cache, stock = filled("k2v2", count=count, sink_tokens=4, recent_tokens=8)
    for add in (1, 1, 20, 3, 1):
        for ours, theirs in extend(cache, stock, 2, add, seed=add):
            for a, b in zip(ours, theirs, strict=True):
                a = a + 0
                assert torch.equal(a[:, :, :4], b[:, :, :4])
                assert torch.equal(a[:, :, -8:], b[:, :, -8:])
                middle = slice(4, b.shape[2] - 8 - (add if add > 8 else 0))
                if middle.stop > middle.start:
                    assert not torch.equal(a[:, :, middle], b[:, :, middle])
    assert cache.nbytes < sum(layer.keys.numel() * 8 for layer in stock.layers)


def test_a_high_precision_window_fused_equals_decoded_and_changes_with_the_batch():
    model = tiny("llama", layers=1)
    ids = tokens(2, 50)
    runs = []
    for fused in (False, True):
        cache = slimkv.SlimKVCache(model.config, "k4v4", sink_tokens=4, recent_tokens=16, block_size=16)
        model.set_attn_implementation("slimkv" if fused else "sdpa")
        with torch.no_grad():
            model(ids, past_key_values=cache)
            logits = [model(ids[:, :1], past_key_values=cache).logits]
            cache.batch_repeat_interleave(2)
            cache.crop(-2)
            logits.append(model(ids[:, 5:10].repeat_interleave(2, 0), past_key_values=cache).logits)
            logits.append(model(ids[:, 5:35].repeat_interleave(2, 0), past_key_values=cache).logits)
        runs.append(torch.cat([x.flatten() for x in logits]))
    torch.testing.assert_close(*runs, rtol=0, atol=1e-4 * float(runs[0].abs().max()))


def test_windows_can_be_cropped_into_the_packed_part():
    cache, stock = filled("k8v8", count=40, sink_tokens=4, recent_tokens=8)
    for cache_or_stock in (cache, stock):
        cache_or_stock.crop(-20)
    assert cache.get_seq_length() == 20
    for ours, theirs in extend(cache, stock, 2, 1):
        assert torch.equal(ours[0][:, :, :4], theirs[0][:, :, :4])
        torch.testing.assert_close(ours[0] + 0, theirs[0], rtol=0, atol=0.1)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong():
    config = tiny().config
    with pytest.raises(SpecError, match="unknown format 'k9v9'"):
        slimkv.SlimKVCache(config, "k9v9")
    config.head_dim = 40
    with pytest.raises(SpecError, match="40 is not supported"):
        slimkv.SlimKVCache(config, "k4v4")
    config.head_dim = 32
    with pytest.raises(SpecError, match="block size 48"):
        slimkv.SlimKVCache(config, "k4v4", block_size=48)
    with pytest.raises(InputError, match="choose one"):
        slimkv.SlimKVCache(config, "k4v4", fresh="codes", recent_tokens=8)
    cache, _ = filled()
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    with pytest.raises(InputError, match="2 sequences and was given 3"):
        cache.update(*states(3, 1), 0)
    with pytest.raises(InputError, match=r"float32 and was given torch\.float16"):
        cache.update(*states(2, 1, dtype=torch.float16), 0)


@pytest.mark.parametrize("options", [{}, {"sink_tokens": 4, "recent_tokens": 8}, {"age": {12: "k4v4"}}], ids=str)
def test_a_cache_does_not_serve_two_models_in_turn(options):
    """As in generate of SeamlessM4T or Qwen-Omni, which passes its arguments to two models, of different depths."""
    cache = slimkv.SlimKVCache(tiny(layers=3).config, "k8v8", block_size=16, **options)
    with torch.no_grad():
        tiny(layers=3)(tokens(1, 40), past_key_values=cache)
        tiny(layers=2)(tokens(1, 20), past_key_values=cache)
        with pytest.raises(InputError, match="must take part in every forward pass"):
            tiny(layers=2)(tokens(1, 1), past_key_values=cache)


def test_attention_refuses_what_it_does_not_do():
    from slimkv.integrations.transformers import slimkv_attention

    query, (key, value) = torch.randn(1, 4, 3, DIM), states(1, 3)
    for name, arguments in (
        ("dropout", {"dropout": 0.1}),
        ("indices", {"indices": torch.zeros(1)}),
        ("continuous batching", {"cache": object()}),
        ("output_attentions", {"output_attentions": True}),
    ):
        with pytest.raises(UnsupportedError, match=name):
            slimkv_attention(torch.nn.Module(), query, key, value, None, **arguments)


def test_padding_may_not_vanish():
    model = tiny()
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :4] = 0
    cache = slimkv.SlimKVCache(model.config, "k4v4", fresh="codes")
    with slimkv.attention(model), torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(InputError, match="left padding"):
            model(ids[:, :1], past_key_values=cache)
        mask = torch.ones(2, 22, dtype=torch.int64)
        mask[0, :2] = 0


def test_the_context_manager_puts_back_what_was_there():
    model = tiny(attention="eager")
    with slimkv.attention(model):
        assert model.config._attn_implementation == "slimkv"
        with pytest.raises(ZeroDivisionError), slimkv.attention(model):
            raise ZeroDivisionError
        assert model.config._attn_implementation == "slimkv"
    assert model.config._attn_implementation == "eager"
    assert model.model.config._attn_implementation == "eager"


def test_core_does_not_import_transformers():
    import subprocess
    import sys

    code = "import sys, slimkv; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("window", [{}, {"sink_tokens": 4, "recent_tokens": 8}], ids=["paged", "windowed"])
def test_a_named_implementation_also_attends(window, monkeypatch):
    """A backend chosen by name is used for attention, without a fallback to others."""
    from slimkv.ops.attention import cpu, reference

    ran = []

    def count(module, function):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda request: ran.append(module) or real(request))

    count(cpu, "run")
    count(cpu, "plan")
    count(reference, "run")
    model = tiny("llama")
    cache = slimkv.SlimKVCache(model.config, "k4v4", block_size=16, backend="reference", **window)
    with torch.no_grad(), slimkv.attention(model):
        for ids in (tokens(1, 40), tokens(1, 1)):
            model(ids, past_key_values=cache)
    assert ran
    assert set(ran) == {reference}
