"""Acceptance of n-gram drafts: drafted tokens, verification steps, and a packed cache compared with the stock one."""

import importlib.util
from pathlib import Path

import pytest

from slimkv.lab.evals.acceptance import measure_acceptance, ngram_draft, verifications


def test_a_draft_is_what_followed_the_longest_match_last():
    assert ngram_draft([1, 2, 3, 9, 1, 2, 3, 7, 5, 2, 3]) == [7, 5, 2, 3], "the later of two"
    assert ngram_draft([5, 2, 3, 8, 4, 2, 3, 7, 5, 2, 3]) == [8, 4, 2, 3], "the longer of two"
    assert ngram_draft([1, 2, 3, 4]) == []
    assert ngram_draft([1, 2, 3, 1, 2], 2) == [3, 1]


def test_every_step_gives_what_it_accepts_and_one_more():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert verifications(prompt, [9, 9, 9]) == 3, "nothing is accepted"
    assert verifications(prompt, [3, 4, 5, 6, 7, 8]) == 2, "four drafted and one, then one"
    assert verifications(prompt, [3, 4, 0, 0, 1]) == 3, "two accepted and one, then two steps"
    assert verifications(prompt, []) == 0


def test_so_does_a_draft_model_that_reads_along():
    path = Path(__file__).parents[3] / "benchmarks" / "acceptance.py"
    spec = importlib.util.spec_from_file_location("acceptance", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert [script.matching_steps([said] * 5) for said in (False, True)] == [5, 1], "four drafted and one"
    assert script.matching_steps([True, False, True, True, False, True]) == 3
    assert script.ratio_of([4, 4, 4], [5, 5, 5])[0] == 0.8


def test_a_lossless_cache_accepts_as_many():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=64, initializer_range=0.02, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    windows = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    report = measure_acceptance(model, windows, ["krawfp32vrawfp32", "k2v2"], new_tokens=60)
    assert [row.format for row in report.rows] == ["raw", "krawfp32vrawfp32", "k2v2"]
    raw, lossless, _ = report.rows
    assert raw.over_raw == lossless.over_raw == 1.0
    assert 1.0 < raw.acceptance_length <= 5.0, "a small model repeats itself"
