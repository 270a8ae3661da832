"""Latent attention in the real SGLang engine: stock tokens with lossless pages, reproducible ones with codes."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, model_drafts, plugin_path, run_engine, slimkv
from mla_models import LAYERS, LONG, PROMPTS, deepseek_v2, deepseek_v3, saved, transformers_tokens
from prompts import run

from slimkv.spec import LatentSpec, page_layout

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SHARED = [[*LONG[2][:150], 7 + i, 90 + i, 5] for i in range(3)]
# Cached tokens of a prompt are expanded in chunks of at most this many tokens.
CHUNKS = {"SGLANG_MAX_KV_CHUNK_CAPACITY": str(4 * PAGE)}
ROUNDING = 2e-2  # relative rounding of the sizes that SGLang reports, in hundredths of a GiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(deepseek_v2, tmp_path_factory.mktemp("deepseek-v2"))


@pytest.fixture(scope="module")
def stock(folder, tmp_path_factory):
    path = plugin_path(tmp_path_factory.mktemp("plugin"), "latents", "torch_native_latents:register")
    runs = [run("ragged", PROMPTS, 12), run("long", LONG, 12)]
    return run_engine({"model_path": folder, "max_total_tokens": 65536}, runs, PYTHONPATH=path)


@pytest.fixture(scope="module")
def lossless(folder):
    """With mixed batches of decoding requests and prompt chunks."""
    runs = [
        run("ragged", PROMPTS, 12),
        run("long", LONG, 12),
        run("again", LONG, 12),
        run("alone", LONG, 12, one_by_one=True, reset=True),
    ]
    arguments = {"model_path": folder, "enable_mixed_chunk": True, "max_total_tokens": 65536, **slimkv("craw")}
    return run_engine(arguments, runs, **CHUNKS)


@pytest.fixture(scope="module")
def packed(folder):
    runs = [
        run("miss", SHARED, 12, one_by_one=True),
        run("hit", SHARED, 12),
        run("fresh", SHARED, 12, reset=True),
    ]
    return run_engine({"model_path": folder, "max_total_tokens": 65536, **slimkv("c4")}, runs)


@pytest.mark.parametrize("name", ["ragged", "long"])
def test_lossless_pages_give_the_tokens_of_sglang_and_transformers(lossless, stock, folder, name):
    """With prefill in chunks of 96 tokens and mixed batches."""
    assert lossless["tokens"][name] == stock["tokens"][name]
    prompts = {"ragged": PROMPTS, "long": LONG}[name]
    assert lossless["tokens"][name] == transformers_tokens(folder, prompts, 12)


def test_a_lossless_hit_is_a_miss(lossless):
    tokens = lossless["tokens"]
    assert tokens["again"] == tokens["long"] == tokens["alone"]
    assert min(lossless["cached"]["again"]) >= 6 * PAGE


def test_a_hit_answers_as_the_miss_did(packed):
    """The request that wrote a prefix attended to its codes, too."""
    tokens = packed["tokens"]
    assert tokens["miss"] == tokens["hit"] == tokens["fresh"]
    assert min(packed["cached"]["hit"]) >= 4 * PAGE
    assert packed["cached"]["fresh"][0] == 0


def test_tokens_take_the_bytes_of_their_format(lossless, packed, stock):
    """The model runs in float32: unpacked latents take 2,304 bytes, and c4 leaves the rope part in float32."""
    spec = LatentSpec.parse("c4").with_raw_dtype("float32")
    token = page_layout(spec, PAGE).page_bytes // PAGE
    assert token == 256 + 2 + 256
    assert packed["kv_gib"] == pytest.approx(LAYERS * token * (65536 + PAGE) / 2**30, abs=0.006)
    assert lossless["kv_gib"] == pytest.approx(stock["kv_gib"], rel=ROUNDING)


def test_low_rank_queries_and_interleaved_rope(tmp_path):
    v3 = saved(deepseek_v3, tmp_path)
    ours = run_engine({"model_path": v3, **slimkv("raw")}, [run("ragged", PROMPTS, 12), run("long", LONG, 12)])
    assert ours["tokens"]["ragged"] == transformers_tokens(v3, PROMPTS, 12)
    assert ours["tokens"]["long"] == transformers_tokens(v3, LONG, 12)


@pytest.mark.parametrize(
    "parallel",
    [{"tp_size": 2}, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "chunked_prefill_size": 192}],
)
def test_ranks_hold_the_same_latents(folder, packed, parallel):
    """Two ranks with half of the heads each, and two ranks with all heads of their own requests."""
    ours = run_engine(
        {"model_path": folder, **parallel, **slimkv("auto")}, [run("miss", SHARED, 12)],
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )  # fmt: skip
    assert ours["tokens"]["miss"] == packed["tokens"]["miss"]


def test_drafts_change_nothing(folder, packed, tmp_path):
    """The model drafts for itself with unpacked latents; chains of four tokens are verified on codes."""
    (tmp_path / "both.py").write_text(
        "import torch_native_drafts, torch_native_latents\n"
        "def register():\n    torch_native_drafts.register()\n    torch_native_latents.register()\n"
    )
    path = plugin_path(tmp_path, "both", "both:register")
    ours = run_engine(
        {"model_path": folder, **model_drafts(folder), **slimkv("c4")}, [run("miss", SHARED, 12)], PYTHONPATH=path
    )
    assert ours["tokens"]["miss"] == packed["tokens"]["miss"]
    assert 0 < ours["verified"]["miss"] < 3 * 12
