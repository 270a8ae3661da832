import math

import numpy as np
import pytest
from distortion import gaussian_optimum, measure_distortion

from slimkv.errors import SpecError
from slimkv.spec import ScalePolicy

# Distortion of Lloyd-Max quantisers for a Gaussian of variance 1, from the literature.
LITERATURE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def normal_density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def normal_mass(x):
    return np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) if np.isfinite(v) else float(v > 0) for v in x])


@pytest.mark.parametrize("bits", range(1, 9))
def test_gaussian_optimum_against_closed_forms(bits):
    """Compares with Lloyd's iteration on a Gaussian's exact moments; only its starting point comes from the solver."""
    from slimkv.codec.codebook import codebook

    levels = codebook(bits, 10**8).exact_levels.copy() * 1.001  # near the solution; the iteration must reach it
    for _ in range(20_000 if bits <= 5 else 200):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        mass = np.diff(normal_mass(edges))
        mean = -np.diff(normal_density(edges)) / mass
        if np.abs(mean - levels).max() < 1e-12:
            break
        levels = mean
    distortion = 1 - (mass * mean**2).sum()
    assert math.isclose(gaussian_optimum(bits), distortion, rel_tol=1e-5 if bits <= 5 else 1e-3)
    if bits in LITERATURE:
        assert math.isclose(gaussian_optimum(bits), LITERATURE[bits], rel_tol=3e-3)


def check_errors(w, above):
    """Levels are optimal for their number of dimensions, which allows less error than a Gaussian does."""
    assert w.mse < above * w.gaussian_optimum
    assert w.mse < above * LITERATURE.get(w.bits, math.inf)
    assert w.mse > 0.94 * w.gaussian_optimum  # but not implausibly small
    assert math.isclose(w.mse, w.dim_optimum, rel_tol=0.01)
    assert w.over_gaussian == w.mse / w.gaussian_optimum
    assert w.over_dim == w.mse / w.dim_optimum


def check_bound(w):
    assert w.mse < w.paper_bound == math.sqrt(3) * math.pi / 2 / 4**w.bits
    assert all(p.mse < w.paper_bound for p in w.policies if w.bits >= 2)


def check_slopes(w):
    slopes = {p.policy: p.slope for p in w.policies}
    assert list(slopes) == [p.value for p in ScalePolicy]
    theory = {"plain": 1 - w.mse, "norm": math.sqrt(1 - w.mse), "unbiased": 1.0}
    assert {p.policy: p.slope_theory for p in w.policies} == theory
    if w.bits >= 2:
        for policy, slope in slopes.items():
            assert math.isclose(slope, theory[policy], rel_tol=0.003), (w.bits, policy)
    if w.bits <= 3:  # the slopes differ by far more than the tolerance
        assert slopes["plain"] < 0.99 * slopes["norm"] < 0.985 * slopes["unbiased"]


@pytest.mark.parametrize(
    ("dim", "above"),
    [
        (128, 1.01),
        *(pytest.param(dim, 1.03, marks=pytest.mark.tail) for dim in (80, 576)),
        *(pytest.param(dim, 1.03, marks=pytest.mark.slow) for dim in (64, 96, 192)),
    ],
)
def test_distortion_bound_and_slopes(dim, above):
    widths = measure_distortion(dim).widths
    assert [w.bits for w in widths] == list(range(1, 9))
    for w in widths:
        check_errors(w, above)
        check_bound(w)
        check_slopes(w)
        errors = {p.policy: p.mse for p in w.policies}
        assert errors["norm"] < errors["unbiased"] * (1 + 1e-3)


def test_choices_and_mistakes():
    report = measure_distortion(32, [4], [ScalePolicy.NORM], vectors=100)
    assert report.vectors == 100
    assert [p.policy for p in report.widths[0].policies] == ["norm"]
    assert report == measure_distortion(32, [4], [ScalePolicy.NORM], vectors=100)
    assert report != measure_distortion(32, [4], [ScalePolicy.NORM], vectors=100, seed=1)
    with pytest.raises(SpecError, match="head_dim 100"):
        measure_distortion(100)
