"""The real SGLang engine: lossless pages give the tokens of its own cache; with codes, a hit equals a miss."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, crowd, engine, many, prefixed, run_engine, slimkv
from prompts import SHORT_LAYERS, long, ragged, run

from slimkv.spec import CodecSpec, PageLayout

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TINY = 288  # tokens of cache: five requests are admitted and outgrow it
ROUNDING = 5e-3  # relative rounding of the sizes that SGLang reports
# SGLang then uses this share of the free memory instead of a given number of tokens.
FROM_MEMORY = {"max_total_tokens": None, "mem_fraction_static": 0.2}


def everything() -> list[dict]:
    asked = {"ragged": ragged(), "long": long(), "miss": prefixed()[:1], "hit": prefixed()}
    return [run(name, prompts, 8) for name, prompts in asked.items()]


def growing() -> dict:
    """Requests that may end early. For others, SGLang reserves room for all tokens that they may generate."""
    return run("crowd", crowd(), 28, may_end=True)


def both_ways() -> list[dict]:
    return [run("together", many(), 4, reset=True), run("alone", many(), 4, one_by_one=True, reset=True)]


@pytest.fixture(scope="module")
def stock():
    return run_engine(engine(**FROM_MEMORY), [*everything(), growing()])


@pytest.fixture(scope="module")
def raw():
    """With mixed batches of decoding requests and prompt chunks."""
    arguments = engine(enable_mixed_chunk=True, **slimkv("raw"), **FROM_MEMORY)
    return run_engine(arguments, [*everything(), *both_ways()])


@pytest.fixture(scope="module")
def codes():
    """One engine: prompts that miss the radix cache, hit it, and miss it again; 32 prompts as a batch and one by one.

    Its scheduler is spawned, as in real use.
    """
    runs = [run("miss", prefixed(), 12), run("hit", prefixed(), 12), run("again", prefixed(), 12, reset=True)]
    return run_engine(engine(**slimkv("k4v4"), **FROM_MEMORY), [*runs, *both_ways()], spawned=True)


def token_bytes(found: dict) -> float:
    """Bytes per token. SGLang allocates one page more than it reports, and reports GiB with two decimals."""
    return found["kv_gib"] * 2**30 / (found["max_total_num_tokens"] + found["page_size"])


# -- lossless pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ragged", "long", "miss", "hit"])
def test_lossless_pages_give_the_stock_tokens(raw, stock, name):
    """In ragged and mixed batches, with chunked prefill and the radix cache."""
    assert raw["tokens"][name] == stock["tokens"][name]


def test_lossless_pages_take_the_stock_memory(raw, stock):
    assert token_bytes(raw) == pytest.approx(token_bytes(stock), rel=ROUNDING)


def test_the_prefix_was_cached(raw):
    assert min(raw["cached"]["hit"]) >= 6 * PAGE
    assert all(count % PAGE == 0 for count in raw["cached"]["hit"])


def test_a_batch_gives_what_its_requests_give_alone(raw):
    """32 requests of ragged lengths."""
    assert raw["tokens"]["together"] == raw["tokens"]["alone"]


def test_retracted_requests_give_the_stock_tokens(stock):
    """The cache is too small for the batch, so requests are retracted and their tokens computed again."""
    tiny = {"max_total_tokens": TINY, "context_length": 128, "schedule_conservativeness": 0.01}
    ours = run_engine(engine(**slimkv("raw"), disable_radix_cache=True, **tiny), [growing()])
    assert ours["retracted"]["crowd"] > 0
    assert stock["retracted"]["crowd"] == 0
    assert ours["tokens"]["crowd"] == stock["tokens"]["crowd"]


# -- codes -------------------------------------------------------------------------------------------------------------


def test_codes_hit_is_miss(codes):
    """The second time, every page but the last comes from the cache."""
    assert min(codes["cached"]["hit"]) >= 6 * PAGE
    assert codes["cached"]["again"][0] == 0
    assert codes["tokens"]["hit"] == codes["tokens"]["miss"] == codes["tokens"]["again"]


def test_the_cache_holds_as_many_more_tokens_as_advertised(codes, stock):
    """In float32. Free memory depends on the machine, so the bytes per token are compared, too."""
    assert token_bytes(codes) == pytest.approx(len(SHORT_LAYERS) * 3 * 68, rel=ROUNDING), "3 KV heads of 68 bytes"
    ratio = token_bytes(stock) / token_bytes(codes)
    packed = PageLayout(CodecSpec.parse("k4v4", 64), PAGE)
    assert ratio == pytest.approx(2 * packed.compression_ratio, rel=2 * ROUNDING)
    more = codes["max_total_num_tokens"] / stock["max_total_num_tokens"]
    assert more > 0.4 * ratio, "sized by those bytes"


def test_a_batch_of_codes_gives_what_its_requests_give_alone(codes):
    """GEMM rounding depends on the batch shape, so once in a while a value crosses the boundary of a code."""
    pairs = list(zip(codes["tokens"]["together"], codes["tokens"]["alone"], strict=True))
    assert len(pairs) == 32
    assert [a[0] for a, _ in pairs] == [b[0] for _, b in pairs]
    assert sum(a != b for a, b in pairs) <= 2


def test_layers_have_formats_of_their_own():
    layers = {"0": "raw", "-2--1": "raw", "2-4": "k6v4", "3": "turboquant_k8v4"}
    found = run_engine(engine(**slimkv("k4v4", layers=layers), **FROM_MEMORY), [run("a", ragged()[:3], 4)])
    formats = ["k4v4"] * len(SHORT_LAYERS)
    formats[0] = formats[-2] = formats[-1] = "krawfp32vrawfp32"
    formats[2:5] = ["k6v4", "turboquant_k8v4", "k6v4"]
    expected = sum(3 * PageLayout(CodecSpec.parse(format, 64), PAGE).bytes_per_token for format in formats)
    assert token_bytes(found) == pytest.approx(expected, rel=ROUNDING)
    assert all(len(tokens) == 4 for tokens in found["tokens"]["a"])
