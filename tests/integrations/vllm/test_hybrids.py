"""Models with recurrent states, or with sliding windows and sinks: lossless pages give the stock tokens.

Tests are limited to what works in vLLM's CPU build itself. With stock attention, prefix caching of Mamba-2 fails there,
and so do blocks that must be split for kernels. The hybrid therefore has a small state and no prefix cache.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import run_engine, slimkv
from prompts import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(30 + 67 * i)] for i in range(4)]


def falcon_h1():
    """A model with attention and a Mamba-2 state in every layer."""
    return transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=1024, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
            mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16, initializer_range=0.1, tie_word_embeddings=False,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def gpt_oss():
    """A model with sliding windows and learned sinks."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=1024, sliding_window=48, num_local_experts=4,
            num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.1,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("make", "caching"), [(falcon_h1, False), (gpt_oss, True)])
def test_lossless_pages_give_the_stock_tokens_and_codes_the_same_every_time(make, caching, tmp_path):
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    base = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "enable_prefix_caching": caching, "block_size": 128,
        "max_num_batched_tokens": 512,
    }  # fmt: skip
    again = [run("once", PROMPTS, 12), run("again", PROMPTS, 12), run("alone", PROMPTS, 12, one_by_one=True)]
    stock, raw, codes = (run_engine({**base, **how}, again) for how in ({}, slimkv("raw"), slimkv("k4v4")))
    assert raw["tokens"] == stock["tokens"]
    assert codes["tokens"]["once"] == codes["tokens"]["again"] == codes["tokens"]["alone"]
    if caching:
        hits = codes["counters"]
        assert hits["again"]["vllm:prefix_cache_hits"] > hits["once"]["vllm:prefix_cache_hits"]
    assert codes["blocks"] > 3 * stock["blocks"]
