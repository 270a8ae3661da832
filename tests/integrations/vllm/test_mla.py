"""Latent attention in the real engine: stock tokens with lossless pages, reproducible ones with codes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import NGRAM, STOCK_LATENTS, connector, refusals, run_engine, slimkv
from mla_models import (
    LAYERS,
    LONG,
    PROMPTS,
    deepseek_v2,
    deepseek_v3,
    saved,
    transformers_tokens,
    with_drafting_layer,
)
from prompts import model_folder, run

from slimkv import SlimKVCache
from slimkv.integrations.vllm.page_sizes import slot_bytes
from slimkv.spec import LatentSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 16  # for latent attention, vLLM's CPU build changes every block size to this one
SHARED = [[*LONG[2][:150], 7 + i, 90 + i, 5] for i in range(3)]
GUESSABLE = [(LONG[0][:30] * 5)[:140], (LONG[1][:20] * 7)[:130]]
KEEP = {"KEEP_CHUNKS": "1"}


def base(folder, **how):
    return {"model": folder, "skip_tokenizer_init": True, "block_size": BLOCK, **how}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(deepseek_v2, tmp_path_factory.mktemp("deepseek-v2"))


@pytest.fixture(scope="module")
def stock(folder):
    return run_engine(base(folder, **STOCK_LATENTS), [run("ragged", PROMPTS, 12), run("long", LONG, 12)])


@pytest.fixture(scope="module")
def lossless(folder):
    runs = [
        run("ragged", PROMPTS, 12),
        run("long", LONG, 12),
        run("again", LONG, 12),
        run("alone", LONG, 12, one_by_one=True, reset=True),
    ]
    return run_engine(base(folder, **slimkv("craw")), runs, **KEEP)


@pytest.fixture(scope="module")
def packed(folder):
    runs = [
        run("miss", SHARED, 12, one_by_one=True),
        run("hit", SHARED, 12),
        run("fresh", SHARED, 12, reset=True),
        run("guessable", GUESSABLE, 24),
    ]
    return run_engine(base(folder, **slimkv("c4")), runs, **KEEP)


def test_every_layer_is_slimkvs(lossless, stock):
    assert set(map(tuple, lossless["layers"].values())) == {("SlimKVMLAImpl", "crawfp32rrawfp32")}
    assert {kind for kind, _ in stock["layers"].values()} == {"CPUMLAImpl"}
    assert len(lossless["layers"]) == LAYERS


@pytest.mark.parametrize("name", ["ragged", "long"])
def test_lossless_pages_give_the_tokens_of_vllm_and_transformers(lossless, stock, folder, name):
    """With prefill in chunks of 96 tokens and mixed batches."""
    assert lossless["tokens"][name] == stock["tokens"][name]
    prompts = {"ragged": PROMPTS, "long": LONG}[name]
    assert lossless["tokens"][name] == transformers_tokens(folder, prompts, 12)


def test_a_lossless_hit_is_a_miss(lossless):
    tokens, hits = lossless["tokens"], lossless["counters"]
    assert tokens["again"] == tokens["long"] == tokens["alone"]
    assert hits["again"]["vllm:prefix_cache_hits"] - hits["long"]["vllm:prefix_cache_hits"] >= 3 * 12 * BLOCK


def test_lossless_pages_take_the_stock_memory(lossless, stock):
    assert (lossless["blocks"], lossless["block_size"]) == (stock["blocks"], stock["block_size"])


def test_a_hit_answers_as_the_miss_did(packed):
    """The request that wrote a prefix attended to its codes, too."""
    tokens, hits = packed["tokens"], packed["counters"]
    assert tokens["miss"] == tokens["hit"] == tokens["fresh"]
    assert hits["hit"]["vllm:prefix_cache_hits"] - hits["miss"]["vllm:prefix_cache_hits"] >= 3 * 9 * BLOCK


def test_tokens_that_fit_are_as_many_as_the_format_says(packed, stock):
    """The model runs in float32: unpacked latents take 2,304 bytes, and c4 leaves the rope part in float32."""
    spec = LatentSpec.parse("c4").with_raw_dtype("float32")
    assert slot_bytes(spec) == 256 + 2 + 256
    assert packed["blocks"] / stock["blocks"] == pytest.approx(2304 / slot_bytes(spec), rel=0.002)


def test_a_prompt_file_answers_as_the_miss_did(folder, packed, tmp_path):
    """One process reads packed latents that another process wrote, and does not compute the file's tokens again."""
    how = base(folder, **slimkv("c4"), **connector("SlimKVPromptConnector", tmp_path / "store"))
    runs = [run("miss", SHARED, 12, one_by_one=True)]
    writer, reader = (run_engine(how, runs, **KEEP) for _ in range(2))
    assert writer["tokens"] == reader["tokens"] == {"miss": packed["tokens"]["miss"]}
    external = [x["counters"]["miss"]["vllm:external_prefix_cache_hits"] for x in (writer, reader)]
    assert external == [0, 9 * BLOCK], "the other two hit the engine's own cache"


@pytest.mark.extended
def test_latents_travel_between_engines_and_through_stores(folder, tmp_path):
    """Lossless from transformers to vLLM on two ranks; ExampleConnector; a reader with another format is refused."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = SlimKVCache(model, "raw", block_size=BLOCK)
    with torch.no_grad():
        model(torch.tensor([LONG[0][:-1]]), past_key_values=cache)
    cache.save(tmp_path / "prompts" / "a.safetensors", model, LONG[0])
    prompts = connector("SlimKVPromptConnector", tmp_path / "prompts")
    two = {"tensor_parallel_size": 2, "max_num_batched_tokens": 1024}
    read = run_engine(
        base(folder, **slimkv("raw"), **prompts, **two), [run("a", LONG[:2], 12)], VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )
    assert read["tokens"]["a"] == transformers_tokens(folder, LONG[:2], 12)
    assert read["counters"]["a"]["vllm:external_prefix_cache_hits"] == 12 * BLOCK
    written = [path for path in (tmp_path / "prompts").glob("*.safetensors") if path.stem != "a"]
    again = SlimKVCache.load(written[0], model, LONG[1])
    out = model.generate(torch.tensor([LONG[1]]), past_key_values=again, max_new_tokens=12, do_sample=False)
    assert out[0, len(LONG[1]) :].tolist() == read["tokens"]["a"][1]

    whole = {"max_num_batched_tokens": 1024}  # ExampleConnector only writes prompts that are computed in one step
    how = base(folder, **whole, **connector("ExampleConnector", tmp_path / "store"))
    writer, reader = (run_engine({**how, **slimkv("c4")}, [run("a", LONG[:1], 12)], **KEEP) for _ in range(2))
    assert reader["tokens"] == writer["tokens"]
    assert reader["counters"]["a"]["vllm:external_prefix_cache_hits"] == 12 * BLOCK
    said = refusals(how, {"format": slimkv("c4", layers={"1": "c6"})}, **KEEP)
    assert "format of layer 1 is c4rrawfp32, not c6rrawfp32" in said["format"]


@pytest.mark.extended
def test_formats_by_layer_and_drafts_give_what_they_give_without(folder):
    """Verification of four tokens at once gives the tokens of decoding one by one."""
    mixed = slimkv("c4r8", layers={"0": "raw", "-1": "c6r8"})
    runs = [run("guessable", GUESSABLE, 24), run("ragged", PROMPTS, 12)]
    plain = run_engine(base(folder, **mixed), runs, **KEEP)
    drafted = run_engine(base(folder, **mixed, **NGRAM), runs, **KEEP)
    assert [format for _, format in plain["layers"].values()] == ["crawfp32rrawfp32", "c4r8", "c6r8"]
    assert drafted["counters"]["guessable"]["vllm:spec_decode_num_accepted_tokens"] > 5
    assert drafted["tokens"] == plain["tokens"]
    sizes = [slot_bytes(LatentSpec.parse(word)) for word in ("crawfp32rrawfp32", "c4r8", "c6r8")]
    whole = run_engine(base(folder, **STOCK_LATENTS), [])
    assert plain["blocks"] / whole["blocks"] == pytest.approx(3 * 2304 / sum(sizes), rel=0.002)


@pytest.mark.extended
def test_two_ranks_hold_the_same_latents(folder, packed):
    ours = run_engine(
        base(folder, tensor_parallel_size=2, **slimkv("auto")), [run("miss", SHARED, 12)],
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )  # fmt: skip
    assert ours["tokens"]["miss"] == packed["tokens"]["miss"]
    assert ours["blocks"] == packed["blocks"], "a latent belongs to all heads"


def test_low_rank_queries_and_interleaved_rope(tmp_path):
    v3 = saved(deepseek_v3, tmp_path)
    ours = run_engine(base(v3, **slimkv("raw")), [run("ragged", PROMPTS, 12), run("long", LONG, 12)], **KEEP)
    assert ours["tokens"]["ragged"] == transformers_tokens(v3, PROMPTS, 12)
    assert ours["tokens"]["long"] == transformers_tokens(v3, LONG, 12)


def test_a_drafting_layer_changes_nothing(tmp_path):
    """Three tokens are verified at once. The drafter's own latents are packed, too."""
    v3 = with_drafting_layer(saved(deepseek_v3, tmp_path))
    runs = [run("ragged", PROMPTS, 16)]
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CUSTOM"}}
    plain, drafted = (run_engine(base(v3, **slimkv("c4"), **how), runs, **KEEP) for how in ({}, speculation))
    assert drafted["counters"]["ragged"]["vllm:spec_decode_num_drafts"] > 10
    assert drafted["tokens"] == plain["tokens"]
    assert [kind for kind, _ in drafted["layers"].values()] == ["SlimKVMLAImpl"] * (LAYERS + 1)


def test_formats_of_the_other_kind_are_refused(folder):
    said = refusals(
        base(folder),
        {
            "k/v": slimkv("k4v4"),
            "layer": slimkv("c4", layers={"1": "fp8"}),
            "missing layer": slimkv("c4", layers={"3": "c6"}),
            "calibrated": slimkv("c4", calibration="auto"),
            "dtype": {**slimkv("c4"), "kv_cache_dtype": "fp8"},
            "latent": {**slimkv("c4"), "model": model_folder(), "skip_tokenizer_init": False},
        },
    )
    assert "'k4v4' is for K and V, but this model caches latents: use 'c4'" in said["k/v"]
    assert "'fp8' is for K and V, but this model caches latents" in said["layer"]
    assert "the model has layers 0 to 2" in said["missing layer"]
    assert "latent attention does not support calibration='auto'" in said["calibrated"]
    assert "fp8" in said["dtype"]
    assert "started" not in said["dtype"]
    assert "'c4' is for latents, but this model caches K and V: use 'k4v4'" in said["latent"]
