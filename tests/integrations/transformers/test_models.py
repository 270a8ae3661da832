"""Every kind of attention: a lossless packed cache gives the logits and tokens of the stock cache, fused or decoded."""

from __future__ import annotations

import pytest
import torch
from tiny import LOSSLESS, generate, padded, tiny, tokens
from transformers import DynamicCache

import slimkv

KINDS = ["llama", "mha", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4", "qwen3_next"]


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_generation_equals_stock(kind):
    model = tiny(kind)
    ids, mask = padded(50)
    stock = generate(model, ids, mask, DynamicCache(config=model.config))
    expected = torch.stack(stock.logits)
    for strict in (False, True):
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes" if strict else "raw", block_size=16)
        decoded = generate(model, ids, mask, cache)
        assert torch.equal(decoded.sequences, stock.sequences)
        torch.testing.assert_close(torch.stack(decoded.logits), expected, rtol=0, atol=0)
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes" if strict else "raw", block_size=16)
        with slimkv.attention(model) as counts:
            fused = generate(model, ids, mask, cache)
        assert torch.equal(fused.sequences, stock.sequences)
        # Fused attention sums in another order. Mixtures of experts amplify the differences most.
        torch.testing.assert_close(torch.stack(fused.logits), expected, rtol=0, atol=4e-5 * float(expected.abs().max()))
        assert counts.fused > 0
        assert counts.decoded == 0 or kind == "llama4"
    if kind == "llama4":
        assert counts.decoded == 2 * 24  # the two chunked layers


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
@pytest.mark.parametrize("format", ["k4v4", "turboquant_k8v4"])
def test_fused_equals_decoded(kind, format):
    # Only one layer: rounding differences of the first layer could change codes of a second one.
    model = tiny(kind, layers=1)
    ids, mask = padded(50)
    runs = []
    for fused in (False, True):
        cache = slimkv.SlimKVCache(model.config, format, fresh="codes", block_size=16)
        if fused:
            with slimkv.attention(model):
                runs.append(generate(model, ids, mask, cache))
        else:
            runs.append(generate(model, ids, mask, cache))
    a, b = (torch.stack(r.logits) for r in runs)
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(a.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("chunks", [[60], [33, 27], [20, 1, 9, 30], [7, 7, 46]])
@pytest.mark.parametrize("fused", [False, True])
def test_chunked_prefill_equals_one_pass(kind, chunks, fused):
    model = tiny(kind)
    ids = tokens(2, 60)
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes", block_size=16)
        model.set_attn_implementation("slimkv" if fused else model.config._attn_implementation)
        parts, start = [], 0
        for size in chunks:
            parts.append(model(ids[:, start : start + size], past_key_values=cache).logits)
            start += size
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype):
    model = tiny("llama", dtype)
    ids, mask = padded(40)
    format = {torch.float16: "krawfp16vrawfp16", torch.bfloat16: "krawbf16vrawbf16"}[dtype]
    stock = generate(model, ids, mask, DynamicCache(config=model.config), new=8)
    packed = generate(model, ids, mask, slimkv.SlimKVCache(model.config, format, fresh="codes"), new=8)
    assert torch.equal(packed.sequences, stock.sequences)
    for fused in (False, True):
        cache = slimkv.SlimKVCache(model.config, "k8v8", fresh="codes")
        if fused:
            with slimkv.attention(model):
                out = generate(model, ids, mask, cache, new=8)
        else:
            out = generate(model, ids, mask, cache, new=8)
        assert torch.stack(out.logits).isfinite().all()
        assert cache.layers[0].keys.dtype == dtype


def test_padding_spread_over_chunks():
    """For one sequence, the first pass is only padding, and its tokens follow later."""
    model = tiny("llama")
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes", block_size=16)
    stock = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for start, end in ((0, 12), (12, 30), (30, 31), (31, 40)):
        arguments = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        with torch.no_grad():
            expected = model(ids[:, start:end], past_key_values=stock, **arguments).logits
            with slimkv.attention(model) as counts:
                actual = model(ids[:, start:end], past_key_values=cache, **arguments).logits
        assert counts.fused == 3
        shown = mask[:, start:end].bool()
        torch.testing.assert_close(actual[shown], expected[shown], rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_a_mask_of_somebody_else_is_obeyed():
    model = tiny("llama")
    ids = tokens(1, 20)
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    allowed[10:, 3:6] = False
    with torch.no_grad():
        expected = model(
            ids, attention_mask=allowed[None, None], past_key_values=DynamicCache(config=model.config)
        ).logits
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes")
        with slimkv.attention(model) as counts:
            actual = model(ids, attention_mask=allowed[None, None], past_key_values=cache).logits
    assert (counts.fused, counts.decoded) == (0, 3)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_a_hole_in_the_padding_mask_is_obeyed():
    """Right padding of an earlier turn leaves a hole in the mask, so attention decodes and masks."""
    model = tiny("llama")
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[1, 10:14] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes")
        with slimkv.attention(model) as counts:
            actual = model(ids, attention_mask=mask, past_key_values=cache).logits
    assert (counts.fused, counts.decoded) == (0, 3)
    shown = mask.bool()
    torch.testing.assert_close(actual[shown], expected[shown], rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["gemma3", "mistral", "llama"])
@pytest.mark.parametrize("padding", [False, True])
def test_bidirectional_attention_keeps_its_mask(kind, padding):
    """With ``is_causal=False`` in the config (as by ``use_bidirectional_attention``), every token sees all others."""
    model = tiny(kind)
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    ids, mask = padded(40) if padding else (tokens(2, 40), torch.ones(2, 40, dtype=torch.int64))
    stock = DynamicCache(config=model.config)
    caches = [slimkv.SlimKVCache(model.config, LOSSLESS, fresh=fresh, block_size=16) for fresh in ("raw", "codes")]
    shown = mask.bool()
    for start, end in ((0, 20), (20, 21), (21, 40)):
        arguments = {"attention_mask": mask[:, :end]}
        with torch.no_grad():
            expected = model(ids[:, start:end], past_key_values=stock, **arguments).logits
            for cache in caches:
                with slimkv.attention(model):
                    actual = model(ids[:, start:end], past_key_values=cache, **arguments).logits
                at = shown[:, start:end]
                torch.testing.assert_close(actual[at], expected[at], rtol=0, atol=2e-5 * float(expected.abs().max()))
