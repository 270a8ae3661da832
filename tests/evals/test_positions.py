"""KL by position: passes in chunks give what one pass gives, and ranges are those of positions."""

from __future__ import annotations

import pytest
import torch

from slimkv.errors import InputError
from slimkv.evals.agreement import measure_agreement
from slimkv.evals.positions import measure_positions, plot_positions, range_edges


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


def test_ranges_end_with_the_window():
    assert range_edges(8192) == (256, 1024, 2048, 4096, 6144, 8192)
    assert range_edges(100) == (100,)


def test_plot(small, tmp_path):
    windows = torch.randint(1, 128, (1, 300), generator=torch.Generator().manual_seed(0))
    plot_positions(measure_positions(small.model, windows, ["k3v3"]), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
