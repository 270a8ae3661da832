"""Layers that read the cache of an earlier layer and have no keys of their own (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import refusals, run_engine, slimkv
from prompts import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS, SHARED = 6, 2  # the last two read the caches of layers 2 (windowed) and 3
PROMPTS = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(30 + 67 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        hidden_size=64, intermediate_size=[128] * LAYERS, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=512, vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2, num_kv_shared_layers=SHARED,
        layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=48, max_position_embeddings=1024,
        activation_sparsity_pattern=[0.0] * LAYERS, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma3n")
    transformers.Gemma3nForCausalLM(config).eval().save_pretrained(folder)
    return {"model": str(folder), "skip_tokenizer_init": True}


def test_lossless_pages_give_the_stock_tokens_and_codes_the_same_every_time(base):
    runs = [run("once", PROMPTS, 12), run("again", PROMPTS, 12)]
    stock, raw, codes = (run_engine({**base, **how}, runs) for how in ({}, slimkv("raw"), slimkv("k4v4")))
    assert raw["tokens"] == stock["tokens"]
    assert codes["tokens"]["once"] == codes["tokens"]["again"]
    assert len(codes["layers"]) == LAYERS


def test_a_layer_without_a_cache_has_no_format_of_its_own(base):
    said = refusals(
        base,
        {
            "the reader": slimkv("k4v4", layers={"-1": "raw"}),
            "the owner": slimkv("k4v4", layers={"3": "fp8"}),
        },
    )
    assert "layer 5 reads the cache of layer 3, so both have one format" in said["the reader"]
    assert "'raw' for layer 5 and 'k4v4' for layer 3" in said["the reader"]
    assert "'k4v4' for layer 5 and 'fp8' for layer 3" in said["the owner"]
    both = run_engine({**base, **slimkv("k4v4", layers={"3": "fp8", "5": "fp8"})}, [run("a", PROMPTS, 4)])
    assert [format for _, format in both["layers"].values()] == ["k4v4"] * 3 + ["fp8", "k4v4", "fp8"]
