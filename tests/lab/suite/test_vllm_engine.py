"""The tasks in vLLM: the engine's arguments, and that it answers like transformers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from slimkv.errors import MissingDependencyError
from slimkv.integrations.serving.listener import silent
from slimkv.lab import models
from slimkv.lab.engine_process import EngineError
from slimkv.lab.suite.settings import make_settings
from slimkv.lab.suite.tasks import Context, Question
from slimkv.lab.suite.vllm_engine import engine_arguments, run_engine
from slimkv.lab.suite.workbench import Workbench


@pytest.fixture
def bench(tiny_folder, tmp_path):
    return Workbench(make_settings("smoke", str(tiny_folder), device="cpu", engine="vllm"), tmp_path)


def test_what_an_engine_is_started_with(bench, tiny_folder, tmp_path):
    stock = engine_arguments(bench, "raw", 512)
    assert stock["model"] == str(tiny_folder)
    assert stock["enable_prefix_caching"] is True
    assert "additional_config" not in stock
    plain = engine_arguments(bench, "fp8", 512)
    assert plain["attention_backend"] == "CUSTOM"
    assert plain["additional_config"] == {"slimkv": {"format": "fp8", "fresh": "codes"}}
    calibrated = engine_arguments(bench, "k4v4+cal", 512)["additional_config"]["slimkv"]
    assert calibrated["format"] == "k4v4"
    assert calibrated["calibration"] == str(tmp_path / "calibration.safetensors")


CONTEXT = Context("t", 128, tuple(range(100, 190)), (Question((5, 9), (7, 8), 0.5),))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm(bench):
    with pytest.raises(MissingDependencyError, match=r"pip install 'slimkv\[vllm\]'"):
        run_engine(bench, "raw", [CONTEXT], silent)


def test_an_engine_that_does_not_start_is_reported(bench, monkeypatch):
    import sys

    monkeypatch.setattr("slimkv.lab.engine_process.find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="vLLM with raw ended with exit code 1: it printed nothing"):
        run_engine(bench, "raw", [CONTEXT], silent)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("format", ["raw", "k8v8"])  # k8v8: the two find their own key offsets, which 4 bits would show
def test_it_answers_as_transformers_does(bench, tiny_folder, format):
    """The greedy continuation by transformers counts as correct; one with another last token does not."""
    from slimkv.lab.evals.harness import attending

    model = models.load(str(tiny_folder)).model
    prefix, suffixes = tuple(range(100, 228)), [(5, 9, 33), (7, 77, 777)]
    contexts = []
    for right in (True, False):
        questions = []
        for suffix in suffixes:
            ids = torch.tensor([prefix + suffix])
            cache = Workbench(make_settings("smoke", str(tiny_folder), device="cpu", formats=("k8v8",),
                                            calibration="none"), bench.folder).kind(format)  # fmt: skip
            with attending(model, cache.format), torch.no_grad():
                said = model.generate(
                    ids, attention_mask=torch.ones_like(ids), past_key_values=cache.new(model, "strict"),
                    max_new_tokens=3, do_sample=False,
                )[0, ids.shape[1] :].tolist()  # fmt: skip
            questions.append(Question(suffix, tuple(said if right else [*said[:-1], said[-1] + 1]), 0.5))
        contexts.append(Context("t", 256, prefix, tuple(questions)))
    found = run_engine(bench, format, contexts, silent)
    assert found["exact"] == [True, True, False, False]
    assert found["prefix_cache_hits"] >= 3 * 64
