"""Tests with real weights. The long ones run with ``make test-slow``."""

from __future__ import annotations

import pytest
import torch
from fused_vs_decoded import compare_paths

import slimkv
from slimkv.integrations.transformers.calibration.cached import auto_calibration
from slimkv.lab import models
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.generation import prompt_ids
from slimkv.lab.evals.positions import measure_positions
from slimkv.lab.evals.texts import load_text, token_windows


@pytest.fixture(scope="module")
def smollm():
    return models.default()


@pytest.fixture(scope="module")
def gemma():
    return models.load("gemma-3-270m")


def test_smollm_answers_with_a_packed_cache(smollm):
    ids = prompt_ids(smollm.tokenizer, "What is the capital of France?")
    cache = slimkv.SlimKVCache(smollm.model.config, "k4v4")
    with slimkv.attention(smollm.model) as counts:
        out = smollm.model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert "Paris" in smollm.tokenizer.decode(out[0, ids.shape[1] :])
    assert counts.fused > 0
    assert counts.decoded == 0


def test_smollm_packed_cache_is_near_and_a_coarser_one_is_farther(smollm):
    windows = token_windows(smollm.tokenizer, load_text(), 1, 256)
    fine, coarse = measure_agreement(smollm.model, windows, ["k6v6", "k3v3"]).rows
    assert fine.kl < 0.01 < coarse.kl < 1
    assert fine.top1 > 0.93 > coarse.top1 > 0.5


def test_smollm_bytes_at_2048_tokens(smollm):
    cache = slimkv.SlimKVCache(smollm.model.config, "k4v4")
    key = torch.randn(1, 3, 2048, 64)
    for layer in range(30):
        cache.update(key, key, layer)
    assert cache.size().bf16_bytes == 30 * 2 * key.numel() * 2
    assert cache.size().compression_ratio >= 1 / 0.28
    for layer in range(30):
        cache.update(key[:, :, :1], key[:, :, :1], layer)
    assert cache.size().compression_ratio >= 1 / 0.28


@pytest.mark.slow
def test_smollm_paths_agree_over_200_steps(smollm):
    windows = token_windows(smollm.tokenizer, load_text(), 1, 128)
    report = compare_paths(smollm.model, windows, "k4v4", steps=200)
    assert report.median_difference < 1e-5
    assert report.steps_beyond_1e3 <= 20  # steps in which a new key or value was rounded to another code
    assert report.first_different_token is None
    assert report.decoded_calls == 0


@pytest.mark.slow
def test_gemma_generates_past_its_window(gemma):
    """Lossless pages give the stock text before and after position 512; packed pages give the same beginning."""
    windows = token_windows(gemma.tokenizer, load_text(), 1, 500)
    runs = {}
    for format in ("raw", "krawfp32vrawfp32", "k6v6"):
        cache = slimkv.SlimKVCache(gemma.model.config, format)
        with slimkv.attention(gemma.model) as counts:
            out = gemma.model.generate(
                windows, attention_mask=torch.ones_like(windows), past_key_values=cache, max_new_tokens=40,
                min_new_tokens=40, do_sample=False,
            )  # fmt: skip
        runs[format] = out[0, 500:].tolist()
    assert runs["krawfp32vrawfp32"] == runs["raw"]
    assert runs["k6v6"][:4] == runs["raw"][:4]
    assert counts.fused == 39 * 18
    assert cache.get_seq_length() == 539
    assert cache.layers[0].nbytes < cache.layers[5].nbytes * 1.1  # a window of 512 against 539 tokens


@pytest.mark.slow
def test_gemma_strict_perplexity(gemma):
    windows = token_windows(gemma.tokenizer, load_text(), 1, 1024)
    report = measure_agreement(gemma.model, windows, ["k6v6"])
    assert abs(report.rows[0].over_raw) < 0.01


@pytest.mark.slow
def test_smollm_a_calibration_is_better_than_none_at_every_position(smollm, tmp_path):
    """Up to position 8,192, with a calibration from fragments of 128 tokens."""
    known = auto_calibration(smollm.model, tmp_path)
    windows = token_windows(smollm.tokenizer, load_text(), 1, 8192)
    plain, calibrated = measure_positions(smollm.model, windows, ["k4v4", "k4v4+cal"], calibration=known).rows
    assert len(plain.kl) == 6
    assert all(with_it < without for with_it, without in zip(calibrated.kl, plain.kl, strict=True))
    assert calibrated.mean_kl < 0.7 * plain.mean_kl
