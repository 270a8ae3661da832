"""SGLang on a GPU: deterministic serving, the quality of codes, a cold tier. Each engine runs in its own processes.

python -m pytest tests/gpu/test_sglang.py -s
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "shared"))
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "sglang"))

from engines import cold, model_drafts, ngram_drafts, plugin_path, run_engines, slimkv
from prompts import first_token_difference, model_folder, piece, run, text_tokens, various
from row_exact import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.slow]

# A cache of fixed size, because the engines of a test start concurrently. FlashInfer's sampler and DeepGEMM are off,
# because both take minutes to compile.
GPU = {
    "device": "cuda", "dtype": "bfloat16", "page_size": 64, "disable_cuda_graph": False, "cuda_graph_max_bs_decode": 32,
    "disable_prefill_cuda_graph": True, "max_total_tokens": 1 << 16, "mem_fraction_static": 0.9,
    "chunked_prefill_size": 8192, "context_length": 2048, "sampling_backend": "pytorch",
}  # fmt: skip
ENVIRONMENT = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for an empty cache of key offsets, and for the plugin, even if slimkv is not installed with pip."""
    path = plugin_path(tmp_path_factory.mktemp("plugin"), "slimkv", "slimkv.integrations.sglang.plugin:register")
    return {**ENVIRONMENT, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def deterministic_engines(model: str) -> dict[str, tuple[dict, list[dict]]]:
    """Engines and their runs, by name: 32 prompts one by one, together, from the cache, in chunks, with drafts."""
    together = run("together", various(), 40, logprobs=3)
    plain = [together, {**together, "name": "cached"}, {**together, "name": "alone", "one_by_one": True, "reset": True}]
    shared = {**GPU, "model_path": model, "enable_deterministic_inference": True, **slimkv("k4v4"), "page_size": 64}
    others = {
        "chunked": {"chunked_prefill_size": 256},
        "n-gram": ngram_drafts(),
        "draft model": model_drafts(model, "fa3"),
    }
    return {"plain": (shared, plain)} | {name: ({**shared, **more}, [together]) for name, more in others.items()}


def assert_deterministic(found: dict[str, dict]) -> None:
    """The results of ``deterministic_engines`` are the same to the last bit, and drafts were accepted."""
    plain = found["plain"]
    for name in ("cached", "alone"):
        assert_same(plain, "together", plain, name)
    assert sum(plain["cached"]["cached"]) > 1000, "the radix cache is on"
    for name in ("chunked", "n-gram", "draft model"):
        assert_same(plain, "together", found[name], "together")
        assert name == "chunked" or 0 < found[name]["verified"]["together"] < 39 * len(various()), name


def test_deterministic_answers_depend_on_their_prompt_alone(environment):
    engines = deterministic_engines(model_folder())
    assert_deterministic(dict(zip(engines, run_engines(*engines.values(), **environment), strict=True)))


def perplexity(found: dict, name: str) -> float:
    """The perplexity of the prompts of a run with ``prompt_logprobs``."""
    each = [x for prompt in found["prompt_logprobs"][name] for x in prompt]
    return math.exp(-sum(each) / len(each))


def test_a_text_is_about_as_likely_as_with_the_stock_cache(environment):
    """The perplexity of an English text in one prompt: k4v4 costs about 2%."""
    asked = run("text", [piece(0, 2000)], 1, prompt_logprobs=True)
    base = {**GPU, "model_path": model_folder()}
    stock, codes = run_engines(
        ({**base, "attention_backend": "fa3"}, [asked]), ({**base, **slimkv("k4v4"), "page_size": 64}, [asked]),
        **environment,
    )  # fmt: skip
    print(f"perplexity: fa3 {perplexity(stock, 'text'):.3f}, k4v4 {perplexity(codes, 'text'):.3f}")
    assert perplexity(codes, "text") < 1.05 * perplexity(stock, "text")


# The cache holds one of two sets of prompts; host memory holds both.
SET_PROMPTS, SET_TOKENS, PASSES = 8, 7000, 6
COLD = {"page_size": 64, "attention_backend": "fa3", "context_length": 8192, "max_total_tokens": 56 * 1024,
        "hicache_ratio": 3.0}  # fmt: skip


def cold_runs(lock: str) -> list[dict]:
    """A few prompts: computed, from the cache, and from host memory after long prompts have evicted them.

    The long prompts are two sets that alternate, each of which evicts the other; they are timed.
    """
    text = text_tokens() * (2 + SET_TOKENS // len(text_tokens()))
    prompts = [piece(300 * i, 1000) for i in range(4)]
    sets = [[text[131 * i + 17 :][:SET_TOKENS] for i in range(which, 2 * SET_PROMPTS, 2)] for which in (0, 1)]
    passes = [run(f"{'ab'[i % 2]}{i // 2}", sets[i % 2], 1, lock=lock) for i in range(2 * PASSES)]
    short = run("first", prompts, 8, one_by_one=True, logprobs=20)
    return [short, {**short, "name": "hot"}, *passes, {**short, "name": "cold"}]


def test_a_cold_tier_answers_like_stock_host_memory(environment, tmp_path):
    """Prompts evicted from the GPU are loaded from host memory, packed or not. Prints how long that takes."""
    base = {**GPU, "model_path": model_folder(), **COLD}
    # Differences of logprobs between pages that stayed and pages that came back. bf16 logits are up to 0.1 apart.
    bounds = {"stock": (0, 0.02), "raw": (0, 0.02), "k8v8": (1e-3, 0.5), "k4v4": (0.01, 2.0)}
    engines = {name: {**base, **cold(name, page_size=64)} for name in bounds}
    engines["stock"].pop("json_model_override_args")
    runs = cold_runs(str(tmp_path / "lock"))
    found = dict(zip(bounds, run_engines(*((x, runs) for x in engines.values()), **environment), strict=True))
    returned = [run["name"] for run in runs if run["name"][1:].isdigit() and int(run["name"][1:]) > 0]
    for name, of in found.items():
        times = [of["seconds"][x] for x in returned]
        print(
            f"{name}: {SET_PROMPTS} x {SET_TOKENS} tokens computed in {1e3 * of['seconds']['b0']:.1f} ms, back in "
            f"{1e3 * statistics.median(times):.1f} ms (least {1e3 * min(times):.1f}); logprobs differ by "
            f"{first_token_difference(of, 'hot', 'cold'):.4f}, and by {first_token_difference(of, 'first', 'hot'):.4f} "
            "between a prompt that is computed and one from the cache"
        )
    for name, (least, most) in bounds.items():
        of = found[name]
        assert of["cached"]["a0"] == [0] * SET_PROMPTS, name
        for back in returned:  # whole pages, without the last token, which is computed
            assert of["cached"][back] == [(SET_TOKENS - 1) // 64 * 64] * SET_PROMPTS, (name, back)
        assert of["cached"]["cold"] == of["cached"]["hot"] == [960] * 4, name
        assert least <= first_token_difference(of, "hot", "cold") <= most, name
    assert found["raw"]["tokens"]["cold"] == found["stock"]["tokens"]["cold"]
