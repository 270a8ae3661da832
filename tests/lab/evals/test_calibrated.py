"""Evaluations with a calibration."""

from __future__ import annotations

import pytest

from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.texts import load_text, token_windows


@pytest.fixture(scope="module")
def windows(small):
    return token_windows(small.tokenizer, load_text(), 1, 64)


@pytest.fixture(scope="module")
def calibration(small, windows):
    return gather_calibration(small.model, windows)


def test_evals_take_a_calibration_and_say_so(small, windows, calibration):
    with_it = measure_agreement(small.model, windows, ["k2v2"], calibration=calibration)
    without = measure_agreement(small.model, windows, ["k2v2"])
    assert with_it.calibration == "64 tokens"
    assert without.calibration is None
    assert with_it.rows[-1].perplexity != without.rows[-1].perplexity
