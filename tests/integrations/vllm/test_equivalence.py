"""With lossless pages, the real vLLM engine gives token for token what it gives without slimkv."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import engine, long, prefixed, ragged, run, run_engine, slimkv

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def everything():
    return [run("ragged", ragged(), 12), run("long", long(), 12), run("miss", prefixed()[:1], 8), run("hit", prefixed(), 8)]


@pytest.fixture(scope="module")
def stock():
    return run_engine(engine(), everything())


@pytest.fixture(scope="module")
def raw():
    return run_engine(engine(**slimkv("raw")), everything())


def test_every_layer_is_slimkvs(raw, stock):
    assert set(map(tuple, raw["layers"].values())) == {("SlimKVImpl", "krawfp32vrawfp32")}
    assert {kind for kind, _ in stock["layers"].values()} == {"CPUAttentionBackendImpl"}
    assert len(raw["layers"]) == 30


@pytest.mark.parametrize("name", ["ragged", "long", "miss", "hit"])
def test_lossless_pages_give_the_stock_tokens(raw, stock, name):
    """Mixed batches, chunked prefill, prefix caching."""
    assert raw["tokens"][name] == stock["tokens"][name]


def test_lossless_pages_take_the_stock_memory(raw, stock):
    assert (raw["blocks"], raw["block_size"]) == (stock["blocks"], stock["block_size"])


def test_the_prefix_was_cached(raw):
    hits = [raw["counters"][name]["vllm:prefix_cache_hits"] for name in ("miss", "hit")]
    assert hits[1] - hits[0] >= 3 * 6 * 32


def test_preempted_requests_give_the_stock_tokens(stock):
    """A cache too small for the batch: requests are evicted and their tokens computed again."""
    tiny = {"num_gpu_blocks_override": 9, "max_model_len": 128, "enable_prefix_caching": False}
    ours = run_engine(engine(**tiny, **slimkv("raw")), [run("ragged", ragged(), 12)])
    assert ours["counters"]["ragged"]["vllm:num_preemptions"] > 0
    assert stock["counters"]["ragged"]["vllm:num_preemptions"] == 0
    assert ours["tokens"]["ragged"] == stock["tokens"]["ragged"]
