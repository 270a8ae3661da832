"""Codes in the real SGLang engine: capacity, and what must not change the tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, engine, many, prefixed, ragged, run, run_engine, slimkv

from slimkv.spec import CodecSpec, PageLayout

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# SGLang then takes this share of the memory that is free, instead of a number of tokens.
FROM_MEMORY = {"max_total_tokens": None, "mem_fraction_static": 0.2, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def codes():
    """One engine: prompts that miss the radix cache, hit it, and miss it again; a batch together and one by one."""
    return run_engine(
        engine(**slimkv("k4v4"), **FROM_MEMORY) | {"dtype": "float32"},
        [
            run("miss", prefixed(), 12),
            run("hit", prefixed(), 12),
            run("again", prefixed(), 12, reset=True),
            run("together", many(), 4, reset=True),
            run("alone", many(), 4, one_by_one=True, reset=True),
        ],
    )


def token_bytes(found: dict) -> float:
    return found["kv_gib"] * 2**30 / (found["max_total_num_tokens"] + found["page_size"])


def test_codes_hit_is_miss(codes):
    """The second time every page but the last comes from the cache."""
    assert min(codes["cached"]["hit"]) >= 6 * PAGE
    assert codes["cached"]["again"][0] == 0
    assert codes["tokens"]["hit"] == codes["tokens"]["miss"] == codes["tokens"]["again"]


def test_the_cache_holds_as_many_more_tokens_as_advertised(codes):
    """Of the same memory; what else runs on the machine decides how much that is, so bytes of a token are compared."""
    stock = run_engine(engine(**FROM_MEMORY), [run("any", ragged()[:1], 1)])
    assert token_bytes(codes) == pytest.approx(30 * 3 * 68, rel=1e-3), "30 layers, 3 KV heads of 68 bytes"
    ratio = token_bytes(stock) / token_bytes(codes)
    assert ratio == pytest.approx(PageLayout(CodecSpec.parse("k4v4", 64), PAGE).compression_ratio, rel=5e-3)
    more = codes["max_total_num_tokens"] / stock["max_total_num_tokens"]
    assert 0.7 * ratio < more < 1.4 * ratio, "sized by those bytes"


def test_a_batch_gives_what_its_requests_give_alone(codes):
    """Products of other shapes round otherwise, and now and then a number falls on the other side of a boundary."""
    pairs = list(zip(codes["tokens"]["together"], codes["tokens"]["alone"], strict=True))
    assert len(pairs) == 32
    assert [a[0] for a, _ in pairs] == [b[0] for _, b in pairs]
    assert sum(a != b for a, b in pairs) <= 2


def test_layers_have_formats_of_their_own():
    layers = {"0": "raw", "-2--1": "raw", "4-6": "k6v4", "5": "turboquant_k8v4"}
    found = run_engine(engine(**slimkv("k4v4", layers=layers)), [run("a", ragged()[:3], 4)])
    formats = ["k4v4"] * 30
    formats[0] = formats[28] = formats[29] = "krawfp32vrawfp32"
    formats[4:7] = ["k6v4", "turboquant_k8v4", "k6v4"]
    expected = sum(3 * PageLayout(CodecSpec.parse(format, 64), PAGE).bytes_per_token for format in formats)
    assert token_bytes(found) == pytest.approx(expected, rel=5e-3)
    assert all(len(tokens) == 4 for tokens in found["tokens"]["a"])
