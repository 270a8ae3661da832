"""With lossless pages, the real SGLang engine gives token for token what it gives without slimkv."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, crowd, engine, long, many, prefixed, ragged, run, run_engine, slimkv

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TINY = 320  # tokens of cache, for 8 requests that grow to 56


def everything() -> list[dict]:
    return [run("ragged", ragged()), run("long", long()), run("miss", prefixed()[:1]), run("hit", prefixed())]


@pytest.fixture(scope="module")
def stock():
    return run_engine(engine(), [*everything(), run("crowd", crowd(), 28)])


@pytest.fixture(scope="module")
def raw():
    """With mixed batches: requests that decode beside chunks of prompts."""
    both_ways = [run("together", many(), 4, reset=True), run("alone", many(), 4, one_by_one=True, reset=True)]
    return run_engine(engine(enable_mixed_chunk=True, **slimkv("raw")), [*everything(), *both_ways])


@pytest.mark.parametrize("name", ["ragged", "long", "miss", "hit"])
def test_lossless_pages_give_the_stock_tokens(raw, stock, name):
    """Ragged and mixed batches, chunked prefill, the radix cache."""
    assert raw["tokens"][name] == stock["tokens"][name]


def test_lossless_pages_take_the_stock_memory(raw, stock):
    """Per token; SGLang keeps one page more than it hands out."""
    per_token = [found["kv_gib"] / (found["max_total_num_tokens"] + page) for found, page in ((raw, PAGE), (stock, 1))]
    assert per_token[0] == pytest.approx(per_token[1], rel=0.02)


def test_the_prefix_was_cached(raw):
    assert min(raw["cached"]["hit"]) >= 6 * PAGE
    assert all(count % PAGE == 0 for count in raw["cached"]["hit"])


def test_a_batch_gives_what_its_requests_give_alone(raw):
    """32 requests of ragged lengths."""
    assert raw["tokens"]["together"] == raw["tokens"]["alone"]


def test_retracted_requests_give_the_stock_tokens(stock):
    """A cache too small for the batch: requests are taken back and their tokens computed again."""
    ours = run_engine(
        engine(**slimkv("raw"), disable_radix_cache=True)
        | {"max_total_tokens": TINY, "context_length": 128, "schedule_conservativeness": 0.01},
        [run("crowd", crowd(), 28)],
    )
    assert ours["retracted"]["crowd"] > 0
    assert stock["retracted"]["crowd"] == 0
    assert ours["tokens"]["crowd"] == stock["tokens"]["crowd"]
