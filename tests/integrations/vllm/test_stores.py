"""Packed pages outside an engine: a folder shared by two processes, prompt-cache files, and refusals."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import connector, refusals, run_engine, slimkv
from prompts import run

from slimkv import SlimKVCache
from slimkv.wire import PromptCache
from slimkv.wire.store import MARKER

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

TOKENS = 64


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(folder, seed: int) -> str:
    """A small Llama with 4 query and 2 KV heads of size 64, with random weights large enough to avoid near ties."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("llama"), 0)


@pytest.fixture(scope="module")
def model(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(model, ids: list[int], cache=None) -> list[int]:
    """Greedy tokens with transformers' own attention."""
    given = torch.tensor([ids])
    out = model.generate(given, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def hits(result, name: str) -> float:
    return result["counters"][name]["vllm:external_prefix_cache_hits"]


def test_a_prompt_travels_from_transformers_to_vllm_and_back(folder, model, tmp_path):
    """Lossless pages give the greedy tokens of a new prefill, whichever engine computed them, on one rank or two."""
    first, second, third = prompt(1, 301), prompt(2, 333), prompt(3, 170)
    expected = [generate(model, ids) for ids in (first, second, third)]
    store = tmp_path / "store"
    cache = SlimKVCache(model, "raw", block_size=32)
    with torch.no_grad():
        model(torch.tensor([first[:-1]]), past_key_values=cache)
    cache.save(store / "from-transformers.safetensors", model, first)

    base = {"model": folder, "skip_tokenizer_init": True, **slimkv("raw"), **connector("SlimKVPromptConnector", store)}
    alone = run_engine(base, [run("read", [first], TOKENS), run("write", [second], TOKENS)])
    assert hits(alone, "read") == 288, "nine whole blocks of the 300 tokens that transformers computed"
    assert alone["tokens"] == {"read": [expected[0]], "write": [expected[1]]}

    both = run_engine(
        {**base, "tensor_parallel_size": 2},
        [run("read", [first, second], TOKENS), run("write", [third], TOKENS)],
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert hits(both, "read") == 288 + 320
    assert both["tokens"] == {"read": expected[:2], "write": [expected[2]]}

    written = {len(p.tokens): path for path in store.glob("*.safetensors") for p in [PromptCache.load(path)]}
    assert sorted(written) == [160, 300, 320], "whole blocks; those that were found are not written again"
    for ids, tokens, wanted in ((second, 320, expected[1]), (third, 160, expected[2])):
        loaded = SlimKVCache.load(written[tokens], model, ids)
        assert loaded.get_seq_length() == tokens
        assert generate(model, ids, loaded) == wanted


def test_two_processes_share_a_store_and_nobody_else_does(folder, tmp_path):
    """vLLM's ExampleConnector: a second process reads the first one's k4v4 pages; readers that differ are refused."""
    store = tmp_path / "store"
    whole = {"max_num_batched_tokens": 512}  # ExampleConnector only writes prompts that are computed in one step
    base = {"model": folder, "skip_tokenizer_init": True, **whole, **connector("ExampleConnector", store)}
    runs = [run("a", [prompt(4, 301)], 16)]
    writer = run_engine({**base, **slimkv("k4v4")}, runs)
    reader = run_engine({**base, **slimkv("k4v4")}, runs)
    assert hits(writer, "a") == 0
    assert hits(reader, "a") == 288
    assert reader["tokens"] == writer["tokens"]

    later, unmarked = tmp_path / "later", tmp_path / "unmarked"
    later.mkdir()
    mark = json.loads((store / MARKER).read_text())
    (later / MARKER).write_text(json.dumps({**mark, "layout_version": 99}))
    unmarked.mkdir()
    (unmarked / "something").touch()
    said = refusals(
        base,
        {
            "format": slimkv("k5v3"),
            "one layer": slimkv("k4v4", layers={"1": "k5v3"}),
            "seed": slimkv("k4v4", seed=3),
            "block size": {**slimkv("k4v4"), "block_size": 16},
            "dtype": {**slimkv("k4v4"), "dtype": "bfloat16"},
            "rope": {
                **slimkv("k4v4"),
                "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            },
            "weights": {**slimkv("k4v4"), "model": make(tmp_path / "other", 1)},
            "layout version": {**slimkv("k4v4"), **connector("ExampleConnector", later)},
            "no marker": {**slimkv("k4v4"), **connector("ExampleConnector", unmarked)},
            "no statement": {**slimkv("k4v4"), **connector("MooncakeStoreConnector", store)},
            "in-process LMCache": {**slimkv("k4v4"), **connector("LMCacheConnectorV1", store)},
        },
    )
    wanted = {
        "format": "format of layer 0 is k4v4, not k5v3 (and 2 more layers)",
        "one layer": "format of layer 1 is k4v4, not k5v3",
        "seed": "seed is 81, not 3",
        "block size": "block size is 32, not 16",
        "dtype": "dtype is float32, not bfloat16",
        "rope": "model rope is",
        "weights": "weights are",
        "layout version": "layout version is 99, not 1",
        "no marker": "contains files but no fingerprint",
        "no statement": '"slimkv_fingerprint": "',
        "in-process LMCache": "LMCacheConnectorV1 cannot carry",
    }
    missing = {name: said[name] for name, text in wanted.items() if text not in said[name]}
    assert not missing
