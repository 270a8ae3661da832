"""Query-aware rounding measured by itself, and predictions per layer against measurements."""

from __future__ import annotations

import pytest
import torch

from slimkv.calibration.predict import predicted_cost
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.bit_allocation import WidthRow, log_correlation, measure_widths
from slimkv.lab.evals.perplexity import measure_perplexity
from slimkv.lab.evals.query_aware import measure_query_aware, plot_query_aware, skewed_moment
from slimkv.lab.evals.texts import load_text, token_windows


def test_errors_move_as_predicted():
    report = measure_query_aware(skewed_moment(64), [3, 4], vectors=1024)
    for row in report.rows:
        assert row.query_aware < 0.6
        assert row.query_aware == pytest.approx(row.predicted, rel=0.15)
        assert row.isotropic == pytest.approx(row.isotropic_predicted, rel=0.1)
        assert row.second_sweep < row.query_aware
        assert row.search_4 < row.search_2 < row.query_aware


def test_isotropic_queries_gain_nothing():
    row = measure_query_aware(torch.eye(32, dtype=torch.float64), [4], vectors=256).rows[0]
    assert (row.query_aware, row.predicted) == (pytest.approx(1), pytest.approx(1))


def test_the_picture_is_drawn(tmp_path):
    plot_query_aware(skewed_moment(32), tmp_path / "errors.png", vectors=50)
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def windows(small):
    return token_windows(small.tokenizer, load_text(), 1, 64)


@pytest.fixture(scope="module")
def calibration(small, windows):
    return gather_calibration(small.model, windows)


def test_every_layer_and_side_is_measured_beside_its_prediction(small, windows, calibration):
    report = measure_widths(small.model, windows, calibration, [2, 5])
    assert [(r.layer, r.side, r.bits) for r in report.rows[:4]] == [
        (0, "key", 2), (0, "value", 2), (1, "key", 2), (1, "value", 2),
    ]  # fmt: skip
    assert len(report.rows) == 8
    for coarse, fine in zip(report.rows[:4], report.rows[4:], strict=True):
        assert coarse.kl > fine.kl > 0
        assert coarse.predicted == predicted_cost(calibration, coarse.layer, 2, coarse.side)
    assert report.log_correlation > 0.5  # four bits between the widths must be seen


def test_the_correlation_is_of_logarithms():
    rows = [WidthRow(0, "key", 3, 10.0**n, 3 * 10.0**n) for n in range(4)]
    assert log_correlation(rows) == pytest.approx(1)


def test_evals_take_a_calibration_and_say_so(small, windows, calibration):
    for measure in (measure_agreement, measure_perplexity):
        with_it = measure(small.model, windows, ["k2v2"], calibration=calibration)
        without = measure(small.model, windows, ["k2v2"])
        assert with_it.calibration == "64 tokens"
        assert without.calibration is None
        assert with_it.rows[-1].perplexity != without.rows[-1].perplexity
