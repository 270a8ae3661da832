"""``deterministic`` in the real engine: tokens and log-probabilities depend on their own prompt only.

vLLM's CPU build has no batch-invariant GEMMs (it refuses VLLM_BATCH_INVARIANT=1), so linear layers run row by row here.
Everything else, including attention and storing, is as in real use.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import NGRAM, refusals, run_engines, slimkv
from prompts import run
from row_exact import PROMPTS, assert_same, tiny_model

from slimkv.errors import InputError
from slimkv.integrations.vllm import settings
from slimkv.integrations.vllm.backend import SlimKVBackend
from slimkv.integrations.vllm.mla.backend import SlimKVMLABackend

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOWS = {"sliding_window": 48, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory):
    def asked(name: str, **how: bool) -> dict:
        return run(name, PROMPTS, 10, logprobs=3, **how)

    def drafts(**more: str) -> dict:
        return {"speculative_config": {"method": "draft_model", "model": model, "num_speculative_tokens": 3, **more}}

    base = {
        "model": model, "skip_tokenizer_init": True, "max_num_batched_tokens": 768,
        **slimkv("k4v4", deterministic=True),
    }  # fmt: skip
    windowed = {**base, "hf_overrides": WINDOWS}
    whole = [asked("together"), asked("cached"), asked("alone", one_by_one=True, reset=True)]
    once = [asked("together")]
    processes = [
        {
            "plain": (windowed, whole),
            "chunked": ({**windowed, "max_num_batched_tokens": 64}, once),
            "n-gram": ({**windowed, **NGRAM}, once),  # the last: afterwards vLLM's CPU build cannot start an engine
        },
        {
            "draft model": ({**base, **drafts()}, once),  # the first: vLLM looks up the target's backend only once
            "packed draft model": ({**base, **drafts(attention_backend="CUSTOM")}, once),
            "unwindowed": (base, once),
        },
    ]
    home = str(tmp_path_factory.mktemp("cache"))
    found = {}
    for engines in processes:
        results = run_engines(*engines.values(), in_turn=True, EXACT_ROWS="1", XDG_CACHE_HOME=home)
        found |= dict(zip(engines, results, strict=True))
    return found


@pytest.mark.parametrize("name", ["alone", "cached"])
def test_neighbours_and_the_prefix_cache_change_nothing(answers, name):
    assert_same(answers["plain"], "together", answers["plain"], name)
    hits = [answers["plain"]["counters"][at]["vllm:prefix_cache_hits"] for at in ("together", "cached")]
    assert hits[1] - hits[0] > 1000


@pytest.mark.parametrize("name", ["chunked", "n-gram"])
def test_chunks_and_guesses_change_nothing(answers, name):
    assert_same(answers["plain"], "together", answers[name], "together")


@pytest.mark.parametrize("name", ["draft model", "packed draft model"])
def test_a_draft_model_changes_nothing(answers, name):
    assert_same(answers["unwindowed"], "together", answers[name], "together")
    packed = {format for layer, (_, format) in answers[name]["layers"].items() if "draft" in layer}
    assert packed == ({"k4v4"} if name.startswith("packed") else {None}), answers[name]["layers"]


def test_drafts_were_accepted(answers):
    for name in ("n-gram", "draft model", "packed draft model"):
        assert answers[name]["counters"]["together"]["vllm:spec_decode_num_accepted_tokens"] > 10, name


def test_vllms_switch_sets_it(monkeypatch):
    given = {"slimkv": {"format": "k4v4"}}
    assert not settings.parse(given).deterministic
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert settings.parse(given).deterministic
    with pytest.raises(InputError, match=r"VLLM_BATCH_INVARIANT=1 sets deterministic; .*fresh must be one of"):
        settings.parse({"slimkv": {"fresh": "raw"}})
    assert SlimKVBackend.supports_batch_invariance()
    assert not SlimKVMLABackend.supports_batch_invariance(), "vLLM then refuses the model"


def test_what_it_does_not_reach_is_refused_by_name(model):
    more = {"eight bits": slimkv("k4v4", deterministic=True, prefill="8bit")}
    said = refusals({"model": model, "skip_tokenizer_init": True, **slimkv("k4v4")}, more)
    assert "prefill must be one of 'auto', '16bit', not '8bit'" in said["eight bits"]
