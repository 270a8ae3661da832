"""Sparse latent attention in the real engine, with a stand-in for the indexer (``sparse_on_cpu``)."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import NGRAM, connector, run_engine, slimkv
from mla_models import LAYERS, LONG, PROMPTS, deepseek_v3, saved, transformers_tokens, with_drafting_layer
from prompts import run
from sparse_on_cpu import restricted_tokens, with_indexer

from slimkv.integrations.vllm.page_sizes import slot_bytes
from slimkv.spec import LatentSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK, FEW, ALL = 16, 24, 512
SHARED = [[*LONG[2][:150], 7 + i, 90 + i, 5] for i in range(3)]
ON_CPU = {"KEEP_CHUNKS": "1", "SPARSE_ON_CPU": "1"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A DeepSeek V3 with the same weights."""
    return saved(deepseek_v3, tmp_path_factory.mktemp("deepseek-v3"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function that makes a V3.2 whose queries attend to ``count`` tokens."""
    return lambda count: with_indexer(saved(deepseek_v3, tmp_path_factory.mktemp("deepseek-v32")), count)


def serve(folder, runs, format, **how):
    arguments = {"model": folder, "skip_tokenizer_init": True, "block_size": BLOCK, **slimkv(format), **how}
    return run_engine(arguments, runs, **ON_CPU)


def test_lossless_rows_give_the_tokens_of_dense_attention_on_what_is_picked(dense, model):
    """With chunked prefill, mixed batches and the prefix cache."""
    runs = [run("ragged", PROMPTS, 8), run("long", LONG[:1], 8), run("again", LONG[:1], 8)]
    few, every = (serve(model(count), runs, "craw") for count in (FEW, ALL))
    assert set(map(tuple, few["layers"].values())) == {("SlimKVSparseMLAImpl", "crawfp32rrawfp32")}
    assert len(few["layers"]) == LAYERS
    assert few["tokens"]["ragged"] == restricted_tokens(dense, PROMPTS, 8, FEW)
    assert few["tokens"]["long"] == few["tokens"]["again"] == restricted_tokens(dense, LONG[:1], 8, FEW)
    assert few["counters"]["again"]["vllm:prefix_cache_hits"] >= 11 * BLOCK
    assert every["tokens"]["ragged"] == transformers_tokens(dense, PROMPTS, 8)
    assert every["tokens"] != few["tokens"]


def test_packed_rows_answer_the_same_every_way(model):
    runs = [run("miss", SHARED, 12, one_by_one=True), run("hit", SHARED, 12), run("fresh", SHARED, 12, reset=True)]
    plain = serve(model(FEW), runs, "c4")
    tokens, hits = plain["tokens"], plain["counters"]
    assert tokens["miss"] == tokens["hit"] == tokens["fresh"]
    assert hits["hit"]["vllm:prefix_cache_hits"] - hits["miss"]["vllm:prefix_cache_hits"] >= 3 * 9 * BLOCK
    spec = LatentSpec.parse("c4").with_raw_dtype("float32")
    whole = serve(model(FEW), [], "craw")
    assert plain["blocks"] / whole["blocks"] == pytest.approx(2304 / slot_bytes(spec), rel=0.002)
    drafted = serve(model(FEW), runs[:1], "c4", **NGRAM)
    assert drafted["tokens"]["miss"] == tokens["miss"]


def test_a_prompt_file_of_rows_answers_as_the_miss_did(model, tmp_path):
    """The stand-in indexer caches no keys; ``test_connectors.py`` tests files with an indexer's keys."""
    runs, folder = [run("miss", SHARED[:1], 12)], model(FEW)
    store = connector("SlimKVPromptConnector", tmp_path / "store")
    writer, reader = (serve(folder, runs, "c4", **store) for _ in range(2))
    assert reader["tokens"] == writer["tokens"]
    assert reader["counters"]["miss"]["vllm:external_prefix_cache_hits"] == 9 * BLOCK


def test_a_drafting_layer_changes_nothing(tmp_path):
    """Three tokens are verified at once, each with its own picked tokens. The drafter has an indexer, too."""
    folder = with_indexer(with_drafting_layer(saved(deepseek_v3, tmp_path)), FEW)
    runs = [run("ragged", PROMPTS, 12)]
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CUSTOM"}}
    plain, drafted = (serve(folder, runs, "c4", **how) for how in ({}, speculation))
    assert drafted["counters"]["ragged"]["vllm:spec_decode_num_drafts"] > 10
    assert drafted["tokens"] == plain["tokens"]
    assert [kind for kind, _ in drafted["layers"].values()] == ["SlimKVSparseMLAImpl"] * (LAYERS + 1)
