"""KL divergence by position: passes in chunks give the result of one pass, and ranges are split correctly."""

from __future__ import annotations

import pytest
import torch

from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.lab import models
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.positions import measure_positions, range_edges
from slimkv.lab.evals.texts import load_text, token_windows


def test_the_mean_is_that_of_agreement(small):
    windows = torch.randint(1, 128, (2, 300), generator=torch.Generator().manual_seed(0))
    report = measure_positions(small.model, windows, ["k3v3", "k6v6"], chunk=64)
    assert report.edges == (256, 300)
    want = measure_agreement(small.model, windows, ["k3v3", "k6v6"])
    for row, other in zip(report.rows, want.rows, strict=True):
        assert row.mean_kl == pytest.approx(other.kl, rel=1e-3)
        parts = (256 * row.kl[0] + 44 * row.kl[1]) / 300
        assert parts == pytest.approx(row.mean_kl, rel=1e-9)
        assert (256 * row.top1[0] + 44 * row.top1[1]) / 300 == pytest.approx(other.top1, abs=0.01)
    with pytest.raises(InputError, match="at least 1 token"):
        measure_positions(small.model, windows, ["k3v3"], chunk=0)


@pytest.mark.slow
def test_a_calibration_helps_at_every_position_up_to_8192():
    """SmolLM2, calibrated on its own samples: better than plain rounding in every range of the shipped text."""
    loaded = models.default()
    known = gather_calibration(loaded.model, costs=False)
    windows = token_windows(loaded.tokenizer, load_text(), 1, 8192)
    report = measure_positions(loaded.model, windows, ["k4v4", "k4v4+cal"], calibration=known)
    assert report.edges == (256, 1024, 2048, 4096, 6144, 8192)
    plain, calibrated = report.rows
    ratios = [b / a for a, b in zip(plain.kl, calibrated.kl, strict=True)]
    assert all(ratio < 0.9 for ratio in ratios), ratios
    assert calibrated.mean_kl < 0.7 * plain.mean_kl


def test_ranges_end_with_the_window():
    assert range_edges(8192) == (256, 1024, 2048, 4096, 6144, 8192)
    assert range_edges(100) == (100,)
