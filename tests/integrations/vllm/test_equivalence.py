"""With lossless pages, the real vLLM engine generates exactly the tokens that it generates without slimkv."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import engine, prefixed, run_engine, slimkv
from prompts import SHORT_LAYERS, long, piece, ragged, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


MANY = [piece(37 * i, 2 + (29 * i) % 97) for i in range(32)]
CROWD = run("crowd", [piece(50 * i, 28) for i in range(8)], 24)


def everything():
    return [
        run("ragged", ragged(), 12),
        run("long", long(), 12),
        run("miss", prefixed()[:1], 8),
        run("hit", prefixed(), 8),
    ]


@pytest.fixture(scope="module")
def stock():
    return run_engine(engine(), [*everything(), CROWD])


@pytest.fixture(scope="module")
def raw():
    both_ways = [run("together", MANY, 6, reset=True), run("alone", MANY, 6, one_by_one=True, reset=True)]
    return run_engine(engine(**slimkv("raw")), [*everything(), *both_ways])


def test_every_layer_is_slimkvs(raw, stock):
    assert set(map(tuple, raw["layers"].values())) == {("SlimKVImpl", "krawfp32vrawfp32")}
    assert {kind for kind, _ in stock["layers"].values()} == {"CPUAttentionBackendImpl"}
    assert len(raw["layers"]) == len(SHORT_LAYERS)


@pytest.mark.parametrize("name", ["ragged", "long", "miss", "hit"])
def test_lossless_pages_give_the_stock_tokens(raw, stock, name):
    """In mixed batches, with chunked prefill and prefix caching."""
    assert raw["tokens"][name] == stock["tokens"][name]


def test_lossless_pages_take_the_stock_memory(raw, stock):
    assert (raw["blocks"], raw["block_size"]) == (stock["blocks"], stock["block_size"])


def test_the_prefix_was_cached(raw):
    hits = [raw["counters"][name]["vllm:prefix_cache_hits"] for name in ("miss", "hit")]
    assert hits[1] - hits[0] >= 3 * 6 * 32


def test_a_batch_gives_what_its_requests_give_alone(raw):
    """32 requests of ragged lengths."""
    assert raw["tokens"]["together"] == raw["tokens"]["alone"]


def test_preempted_requests_give_the_stock_tokens(stock):
    """The cache is too small for the batch, so requests are preempted and their tokens computed again."""
    tiny = {"num_gpu_blocks_override": 11, "max_model_len": 128, "enable_prefix_caching": False}
    ours = run_engine(engine(**tiny, **slimkv("raw")), [CROWD])
    assert ours["counters"]["crowd"]["vllm:num_preemptions"] > 0
    assert stock["counters"]["crowd"]["vllm:num_preemptions"] == 0
    assert ours["tokens"]["crowd"] == stock["tokens"]["crowd"]
