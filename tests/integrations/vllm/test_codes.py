"""Codes in the real vLLM engine: capacity, and conditions that must not change the tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import NGRAM, draft_model, engine, prefixed, run_engine, slimkv
from prompts import long, piece, ragged, repeating, run

from slimkv.spec import CodecSpec, PageLayout

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def codes():
    """One engine: prompts that miss the prefix cache, hit it, and miss it again; 32 prompts as a batch and singly."""
    many = [piece(37 * i, 2 + (29 * i) % 97) for i in range(32)]
    return run_engine(
        engine(**slimkv("k4v4")),
        [
            run("miss", prefixed()),
            run("hit", prefixed()),
            run("again", prefixed(), reset=True),
            run("repeating", repeating(), 20, reset=True),
            run("together", many, 6, reset=True),
            run("alone", many, 6, one_by_one=True, reset=True),
        ],
    )


def first_tokens():
    return run("first", [p for p in ragged() if len(p) > 20], 1)


@pytest.fixture(scope="module")
def stock():
    return run_engine(engine(), [first_tokens()])


def test_codes_hit_is_miss(codes):
    """The second time, every block but the last comes from the cache."""
    hits = [codes["counters"][name]["vllm:prefix_cache_hits"] for name in ("miss", "hit", "again")]
    whole = 3 * 6 * 32
    assert hits[1] - hits[0] >= whole
    assert hits[2] - hits[1] < whole, "only what the requests of one batch share"
    assert codes["tokens"]["hit"] == codes["tokens"]["miss"] == codes["tokens"]["again"]


def test_the_cache_holds_as_many_more_tokens_as_advertised(codes, stock):
    """The stock cache is float32, which every CPU supports, so the ratio is twice the advertised ratio to bfloat16."""
    ratio = codes["blocks"] * codes["block_size"] / (stock["blocks"] * stock["block_size"])
    assert ratio == pytest.approx(2 * PageLayout(CodecSpec.parse("k4v4", 64), 32).compression_ratio, rel=4e-3)
    assert ratio > 2 * 3.7


def test_a_batch_gives_what_its_requests_give_alone(codes):
    """GEMM rounding depends on the batch shape, so once in a while a value crosses the boundary of a code."""
    pairs = list(zip(codes["tokens"]["together"], codes["tokens"]["alone"], strict=True))
    assert len(pairs) == 32
    assert [a[0] for a, _ in pairs] == [b[0] for _, b in pairs]
    assert sum(a != b for a, b in pairs) <= 2


def test_speculation_on_codes_changes_nothing(codes):
    with_drafts = run_engine(engine(**NGRAM, **slimkv("k4v4")), [run("repeating", repeating(), 20)])
    assert with_drafts["counters"]["repeating"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert with_drafts["tokens"]["repeating"] == codes["tokens"]["repeating"]


def test_a_draft_model_keeps_its_own_cache_and_changes_nothing(codes):
    """SmolLM2 drafts for itself. The target's pages hold codes, the draft model's cache is vLLM's own."""
    room = {"max_num_batched_tokens": 512}  # draft steps have one more token per request than target steps
    drafted = run_engine(engine(**room, **draft_model(), **slimkv("k4v4")), [run("repeating", repeating(), 20)])
    assert drafted["counters"]["repeating"]["vllm:spec_decode_num_accepted_tokens"] > 10
    assert drafted["tokens"]["repeating"] == codes["tokens"]["repeating"]
    formats = {name.startswith("draft_model"): format for name, (_, format) in drafted["layers"].items()}
    assert formats == {False: "k4v4", True: None}


def test_a_spawned_engine_finds_the_plugin(codes):
    """The engine runs in a separate process, as with ``vllm serve``."""
    result = run_engine(engine(**slimkv("k4v4")), [run("miss", prefixed())], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert result["blocks"] == codes["blocks"]
    assert result["tokens"]["miss"] == codes["tokens"]["miss"]


def test_layers_have_formats_of_their_own():
    settings = {"layers": {"0": "raw", "-2--1": "raw", "2-4": "k6v4", "3": "turboquant_k8v4"}}
    result = run_engine(engine(**slimkv("k4v4", **settings)), [run("a", ragged()[:3], 4), run("b", long()[:1], 4)])
    formats = [format for _, format in result["layers"].values()]
    assert formats[:1] == ["krawfp32vrawfp32"]
    assert formats[-2:] == ["krawfp32vrawfp32"] * 2
    assert formats[2:5] == ["k6v4", "turboquant_k8v4", "k6v4"]
    assert {formats[1], formats[5]} == {"k4v4"}
    per_token = sum(PageLayout(CodecSpec.parse(format, 64), 32).bytes_per_token for format in formats)
    taken = result["blocks"] * result["block_size"] * 3 * per_token
    assert 0.98 < taken / 2**30 <= 1


def test_raw_fresh_tokens_are_an_option(stock):
    """If a prompt is prefilled in one chunk, unquantised new tokens give exactly the tokens of the stock cache."""
    through_codes, raw = (
        run_engine(engine(max_num_batched_tokens=512, **how), [first_tokens()])["tokens"]["first"]
        for how in (slimkv("k2v2"), slimkv("k2v2", fresh="raw"))
    )
    assert raw == stock["tokens"]["first"]
    assert through_codes != stock["tokens"]["first"], "two bits show"
