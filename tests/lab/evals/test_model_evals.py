"""Evals of models: what they count, and that they detect errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.integrations.transformers.calibration.samples import random_windows
from slimkv.lab.evals.agreement import compare_logits, growth_over, measure_agreement, token_losses
from slimkv.lab.evals.generation import compare_tokens, measure_generation
from slimkv.lab.evals.harness import CacheKind, cache_kinds, check_formats
from slimkv.lab.evals.needle import haystack, measure_needle
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.memory_plan import make_plan, shape_of

LOSSLESS = "krawfp32vrawfp32"


@pytest.fixture(scope="module")
def windows(small):
    return token_windows(small.tokenizer, load_text(), 2, 96)


def test_perplexity_of_a_known_distribution():
    ids = torch.tensor([0, 1, 2, 3])
    assert token_losses(torch.zeros(4, 10), ids).tolist() == pytest.approx([math.log(10)] * 3)
    certain = torch.full((4, 10), -100.0)
    certain[torch.arange(3), ids[1:]] = 100.0
    assert token_losses(certain, ids).abs().max() == 0


@pytest.mark.parametrize("mode", ["strict", "serving"])
def test_perplexity_is_equal_for_a_lossless_cache_and_grows_as_bits_go(small, windows, mode):
    report = measure_agreement(small.model, windows, [LOSSLESS, "k8v8", "k2v2"], mode=mode, chunk=32)
    rows = {row.format: row for row in report.rows}
    assert report.mode == mode
    assert abs(rows[LOSSLESS].over_raw) < 1e-5
    assert abs(rows["k8v8"].over_raw) < abs(rows["k2v2"].over_raw)
    assert rows["k2v2"].bytes_per_token < rows["k8v8"].bytes_per_token < report.raw_bytes_per_token


def test_serving_reads_fresh_chunks_raw(small, windows):
    """With one chunk as long as the window, attention reads nothing from the cache and is exact. Strict mode is not."""
    serving = measure_agreement(small.model, windows, ["k2v2"], mode="serving", chunk=96).rows[0]
    strict = measure_agreement(small.model, windows, ["k2v2"], mode="strict").rows[0]
    assert serving.kl == pytest.approx(0, abs=1e-6)
    assert strict.kl > 1e-3


def test_agreement_counts(small, windows):
    raw = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    same, kl = compare_logits(raw, raw)
    assert same.all()
    assert kl.abs().max() == 0
    other = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]])
    same, kl = compare_logits(raw, other)
    assert same.tolist() == [False, True]
    p, q = torch.softmax(raw[0], -1), torch.softmax(other[0], -1)
    assert float(kl[0]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    rows = measure_agreement(small.model, windows, [LOSSLESS, "k6v6", "k2v2"]).rows
    assert rows[0].top1 == 1.0
    assert rows[0].kl < 1e-8
    assert rows[0].kl < rows[1].kl < rows[2].kl
    assert all(row.kl_low <= row.kl <= row.kl_high for row in rows)
    assert all(row.over_raw_low <= row.over_raw <= row.over_raw_high for row in rows)
    assert rows[2].kl_high > rows[2].kl_low > 0
    assert rows[1].top1 > rows[2].top1


def test_growth_and_its_error_over_windows():
    growth, error = growth_over([2.0, 4.0, 6.0, 8.0], [3.0, 4.0, 5.0, 12.0])
    assert growth == pytest.approx(0.2)
    rest = [3.0 - 2.4, 4.0 - 4.8, 5.0 - 7.2, 12.0 - 9.6]
    assert error == pytest.approx((sum(x * x for x in rest) / 3) ** 0.5 / 2 / 5)
    assert growth_over([2.0, 4.0], [2.0, 4.0]) == (0.0, 0.0)
    assert growth_over([2.0], [3.0]) == (0.5, None)


def test_two_arithmetics_of_prefill_in_one_run(small, windows):
    rows = measure_agreement(small.model, windows, ["k4v4", "k2v2"], prefill=["16bit", "8bit"]).rows
    assert [row.format for row in rows] == ["k4v4@16bit", "k4v4@8bit", "k2v2@16bit", "k2v2@8bit"]
    assert [row.prefill for row in rows] == ["16bit", "8bit"] * 2
    assert [row.kl_growth for row in rows[::2]] == [0.0, 0.0]
    for plain, bytes_ in zip(rows[::2], rows[1::2], strict=True):
        assert bytes_.kl != plain.kl
        assert bytes_.kl_growth == pytest.approx(bytes_.kl / plain.kl - 1)
        assert abs(bytes_.kl_growth) < 0.5
        assert plain.kl_growth_error == 0
        assert bytes_.kl_growth_error > 0
    assert measure_agreement(small.model, windows[:1], ["k2v2"]).rows[0].kl_growth is None
    with pytest.raises(InputError, match="prefill must name each arithmetic once"):
        measure_agreement(small.model, windows, ["k2v2"], prefill=["8bit", "8bit"])
    with pytest.raises(UnsupportedError, match="8-bit attention does not support key format 6"):
        measure_agreement(small.model, windows, ["k6v6"], prefill=["8bit"])


@pytest.fixture(scope="module")
def calibration(small):
    return gather_calibration(small.model, random_windows(small.model.config, 1, 64, seed=0))


def test_plain_and_calibrated_in_one_run(small, windows, calibration):
    rows = measure_agreement(small.model, windows, ["k3v3", "k3v3+cal"], calibration=calibration).rows
    assert [row.format for row in rows] == ["k3v3", "k3v3+cal"]
    assert rows[0].bytes_per_token == rows[1].bytes_per_token
    plain = measure_agreement(small.model, windows, ["k3v3"]).rows[0]
    all_calibrated = measure_agreement(small.model, windows, ["k3v3"], calibration=calibration).rows[0]
    assert rows[0].kl == plain.kl
    assert rows[1].kl == all_calibrated.kl != plain.kl


def test_names_of_caches(calibration):
    chosen = [k.calibration is not None for k in cache_kinds(["raw", "k4v4", "k4v4+cal", "calibrated"], calibration)]
    assert chosen == [False, True, True]
    assert all(k.calibration is calibration for k in cache_kinds(["k4v4", "k6v6"], calibration))
    for name in ("k4v4+cal", "calibrated"):
        with pytest.raises(InputError, match="needs a calibration"):
            check_formats([name], calibrated=False)
    with pytest.raises(InputError, match="can be calibrated"):
        check_formats(["raw+cal"], calibrated=True)
    with pytest.raises(SpecError):
        check_formats(["k4w4+cal"], calibrated=True)


def test_bytes_per_token_is_what_plan_says(small, windows):
    shape = shape_of(small.model.config.to_dict())
    formats = ["raw", "k4v4", "k5v4", "fp8"]
    planned = {f.format: f.bytes_per_token for f in make_plan(shape, formats, 2**30).formats}
    for tokens in (40, 96):  # the result must not depend on the window's length
        report = measure_agreement(small.model, windows[:1, :tokens], formats[1:])
        measured = {row.format: row.bytes_per_token for row in report.rows}
        assert {"raw": report.raw_bytes_per_token, **measured} == planned


def test_windows_from_an_offset(small):
    near, far = (token_windows(small.tokenizer, load_text(), 2, 64, offset=x) for x in (0, 32))
    assert torch.equal(near[0, 32:], far[0, :32])
    assert torch.equal(near[1, 32:], far[1, :32])
    with pytest.raises(InputError, match="from token 90 on"):
        token_windows(small.tokenizer, "x" * 100, 1, 64, offset=90)
    with pytest.raises(InputError, match="0 or more"):
        token_windows(small.tokenizer, load_text(), 1, 64, offset=-1)


def test_generation_finds_the_first_difference(small):
    assert compare_tokens([1, 2, 3], [1, 2, 3]) == (None, 1.0)
    assert compare_tokens([1, 2, 3], [1, 5, 3]) == (1, 2 / 3)
    assert compare_tokens([1, 2], [1, 2, 3]) == (2, 2 / 3)
    report = measure_generation(
        small.model, small.tokenizer, [LOSSLESS, "k1v1"], prompts=["a long enough prompt"], new_tokens=12
    )
    lossless, coarse = report.rows
    assert lossless.first_divergence is None
    assert coarse.first_divergence is not None
    with pytest.raises(InputError, match="prompts with words"):
        measure_generation(small.model, small.tokenizer, ["k4v4"], prompts=[" "])


def test_needle_builds_what_it_says(small):
    ids = haystack(small.tokenizer, load_text(), 400, 0.5, "Oslo", 9147)
    assert ids.shape == (1, 400)
    shown = small.tokenizer.decode(ids[0])
    assert 0.3 < shown.index("9147") / 400 < 0.6
    assert shown.rstrip().endswith("is")
    report = measure_needle(small.model, small.tokenizer, load_text(), ["k4v4"], contexts=[300], depths=[0.5])
    assert [(c.format, c.tried) for c in report.cells] == [("raw", 4), ("k4v4", 4)]
    later = haystack(small.tokenizer, load_text(), 400, 0.5, "Oslo", 9147, offset=50)
    assert torch.equal(ids[0, 50:90], later[0, :40])
    with pytest.raises(InputError, match="too short"):
        haystack(small.tokenizer, load_text(), 40, 0.5, "Oslo", 9147)


def test_texts_and_windows_refuse_by_name(small, tmp_path):
    assert "truth universally acknowledged" in load_text()
    (tmp_path / "own.txt").write_text("abc")
    assert load_text(str(tmp_path / "own.txt")) == "abc"
    with pytest.raises(InputError, match="no text file"):
        load_text(str(tmp_path / "absent.txt"))
    with pytest.raises(InputError, match="has 3 tokens"):
        token_windows(small.tokenizer, "abc", 1, 64)
    with pytest.raises(InputError, match="cannot make 0 windows"):
        token_windows(small.tokenizer, "abc", 0, 64)
    with pytest.raises(InputError, match="mode 'loose'"):
        CacheKind("k4v4", "k4v4").new(small.model, "loose")


def test_calibrated_caches_are_named_with_the_format():
    known = SimpleNamespace()
    kinds = cache_kinds(["k4v4", "k4v4+cal", "k3v3+cal", "calibrated"], known)
    assert [(k.name, k.format, k.calibration is known) for k in kinds] == [
        ("k4v4", "k4v4", False),
        ("k4v4+cal", "k4v4", True),
        ("k3v3+cal", "k3v3", True),
        ("calibrated", "calibrated", True),
    ]
    with pytest.raises(InputError, match="not a format that can be calibrated"):
        cache_kinds(["raw+cal"], known)
