"""Calibration of real model classes, and caches that use the calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from tiny import LOSSLESS, generate, padded, tiny, tokens

from slimkv import SlimKVCache, calibrate_model
from slimkv.calibration import Calibration
from slimkv.calibration.rotary import Rotary
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.cached import auto_calibration, fingerprint
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.integrations.transformers.calibration.samples import random_windows
from slimkv.spec import CodecSpec

KINDS = ["llama", "mha", "gemma2", "gemma3", "gpt_oss", "llama4"]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def calibration(model):
    return gather_calibration(model, tokens(2, 96))


def queries_of(model, ids):
    """Post-RoPE queries [heads, tokens, dim] of every layer, as passed to the attention interface."""
    seen = {}

    def record(module, query, key, value, *args, **kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        seen.setdefault(module.layer_idx, []).append(query[0].double())
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    transformers.AttentionInterface.register("recording", record)
    transformers.AttentionMaskInterface.register("recording", transformers.masking_utils.sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("recording")
    try:
        with torch.no_grad():
            for row in ids:
                model(row[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return {layer: torch.cat(parts, 1) for layer, parts in seen.items()}


def test_moments_are_means_over_tokens_and_groups(model, calibration):
    queries = queries_of(model, tokens(2, 96))
    frequencies = model.model.rotary_emb.inv_freq.double()
    rotary = Rotary(torch.stack(torch.arange(32).chunk(2), 1), frequencies)
    assert list(calibration.layers) == sorted(queries) == [0, 1, 2]
    for layer, q in queries.items():
        positions = -torch.arange(96).repeat(2)
        back = rotary.turned(q.transpose(0, 1), positions).transpose(0, 1).double()
        grouped = back.reshape(2, -1, 32)  # query heads 0, 1 read KV head 0
        want = grouped.mT @ grouped / grouped.shape[1]
        assert torch.allclose(calibration.layers[layer].query_moment, want, rtol=1e-3, atol=1e-4)
    assert calibration.source == "192 tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_kind_is_seen_and_the_model_left_as_it_was(kind):
    model = tiny(kind)
    ids = tokens(1, 40)
    with torch.no_grad():
        before, implementation = model(ids).logits, model.config._attn_implementation
    made = gather_calibration(model, ids)
    assert list(made.layers) == [0, 1, 2]
    for layer in made.layers.values():
        assert layer.num_kv_heads == (4 if kind == "mha" else 2)
        assert torch.linalg.eigvalsh(layer.query_moment).min() > -1e-9
        assert (layer.key_weight > 0).all()
        assert (layer.value_weight > 0).all()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == implementation


def test_linear_attention_layers_are_left_out():
    made = gather_calibration(tiny("qwen3_next"), tokens(1, 40))
    assert list(made.layers) == [1]


@pytest.mark.parametrize("options", [{}, {"fresh": "codes"}, {"sink_tokens": 4, "recent_tokens": 8}])
def test_a_calibrated_cache_answers_in_every_mode(model, calibration, options):
    ids, mask = padded(60)
    cache = SlimKVCache(model.config, "k4v4", calibration=calibration, **options)
    assert generate(model, ids, mask, cache).sequences.shape == (3, 84)
    assert all(layer.pool.query_aware is not None for layer in cache.packed_layers)


def test_keys_are_rounded_for_their_queries():
    """The calibration reduces the error of keys that is visible to queries."""
    model = tiny("llama")
    with torch.no_grad():  # as in trained models, queries lie near few directions
        small = torch.logspace(0, -2, 16).repeat(2).repeat(4)
        model.model.layers[0].self_attn.q_proj.weight.mul_(small[:, None])
    calibration, ids = gather_calibration(model, tokens(2, 96)), tokens(1, 96, seed=5)
    queries, seen = queries_of(model, ids), []
    with torch.no_grad():
        exact = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=exact)
        for known in (None, calibration):
            cache = SlimKVCache(model.config, "k3v3", calibration=known)
            model(ids, past_key_values=cache)
            error = cache.layers[0].keys.decoded()[0].double() - exact.layers[0].keys[0].double()
            seen.append((queries[0].reshape(2, -1, 32) @ error.mT).square().mean())
    assert seen[1] < 0.6 * seen[0]


def test_sliding_layers_and_mixed_formats():
    model = tiny("gemma3")
    known = gather_calibration(model, tokens(2, 64))
    cache = SlimKVCache(model.config, layers={0: "k3v3", 1: LOSSLESS, 2: "turboquant_k8v4"}, calibration=known)
    generate(model, *padded(40), cache)
    assert [layer.pool.query_aware is not None for layer in cache.packed_layers] == [True, False, False]


def test_files_are_taken_and_checked(model, calibration, tmp_path):
    path = tmp_path / "model.safetensors"
    calibration.save(path)
    SlimKVCache(model.config, calibration=path)
    SlimKVCache(model, calibration=str(path))
    with pytest.raises(InputError, match="num_key_value_heads is 4, the calibration has 2"):
        SlimKVCache(tiny("mha").config, calibration=path)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"profile": "silly"}, "unknown profile 'silly'; use one of lossless, balanced, aggressive"),
        ({"budget": 99}, "more than 2 and less than 9, not 99"),
        ({"budget": 4, "profile": "balanced"}, "give one of them"),
    ],
)
def test_widths_are_refused_before_the_model_runs(asked, message):
    with pytest.raises(InputError, match=message):
        calibrate_model(None, **asked)


def test_formats_that_the_calibration_chose(model, calibration):
    chosen = calibration.with_formats({0: "k3v3", 1: "k4v4", 2: "k5v4"})
    cache = SlimKVCache(model.config, "calibrated", calibration=chosen)
    assert [layer.format for layer in cache.packed_layers] == ["k3v3", "k4v4", "k5v4"]
    for without in (None, calibration):
        with pytest.raises(InputError, match="made for a budget"):
            SlimKVCache(model.config, "calibrated", calibration=without)


def test_auto_is_made_once_and_found_again(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    real = gather_calibration

    def counting(*args, **kwargs):
        calls.append(1)
        return real(args[0], random_windows(args[0].config, 1, 64), **kwargs)

    monkeypatch.setattr("slimkv.integrations.transformers.calibration.cached.gather_calibration", counting)
    for _ in range(2):
        cache = SlimKVCache(model, calibration="auto")
        generate(model, *padded(20), cache, new=2)
    assert len(calls) == 1
    (made,) = (tmp_path / "slimkv" / "calibrations").glob("*.safetensors")
    made.write_bytes(b"broken")
    auto_calibration(model)
    assert len(calls) == 2
    assert Calibration.load(made).layers.keys() == {0, 1, 2}
    with pytest.raises(InputError, match="give the model itself instead of its config"):
        SlimKVCache(model.config, calibration="auto")


def test_other_weights_are_another_model(model):
    other = tiny("llama")
    assert fingerprint(other) == fingerprint(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    assert fingerprint(other) != fingerprint(model)


def test_a_calibration_of_other_heads_is_refused(model, calibration):
    wrong = {n: replace(x, query_moment=x.query_moment[:1]) for n, x in calibration.layers.items()}
    cache = SlimKVCache(model.config, calibration=replace(calibration, layers=wrong, _matrices={}))
    with pytest.raises(InputError, match=r"matrices must be int8 \[2, 32, 32\]"):
        generate(model, *padded(20), cache, new=2)


def test_matrices_do_not_depend_on_torchs_default_dtype(tmp_path):
    """An engine may compute them in a thread while it loads weights with another default dtype."""
    path = tmp_path / "calibration.safetensors"
    gather_calibration(tiny("llama"), tokens(1, 40), costs=False).save(path)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            known = Calibration.load(path)
            codec = Codec(CodecSpec.parse("k4v4", known.statistics(0).key_dim), "cpu")
            found.append((known.query_aware_matrices(0, codec), known.key_offset(0, codec)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
