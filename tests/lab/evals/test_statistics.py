"""Confidence intervals and statistical tests, compared with known values."""

from __future__ import annotations

import math
import random

import pytest
import torch

from slimkv.errors import InputError
from slimkv.lab.evals.statistics import (
    NOT_DISTINGUISHABLE,
    bootstrap,
    holm,
    mcnemar,
    mean_over_tokens,
    paired_answers,
    verdict,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # Wilson score intervals from Newcombe (1998), table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson(right, asked, low, high):
    found = wilson(right, asked)
    assert found.value == right / asked
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_wilson_refuses():
    with pytest.raises(InputError, match="3 successes of 2 trials"):
        wilson(3, 2)
    with pytest.raises(InputError, match="0 successes of 0 trials"):
        wilson(0, 0)


def test_mcnemar_is_an_exact_binomial_test():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * (1 + 10) / 2**10)


def test_bootstrap_covers_the_mean_and_draws_whole_clusters():
    source = random.Random(0)
    hits = 0
    for seed in range(60):
        sums = [source.gauss(0.3, 1.0) for _ in range(60)]
        interval, _ = bootstrap(sums, [1] * 60, samples=500, seed=seed)
        hits += interval.low <= 0.3 <= interval.high
    assert 51 <= hits <= 60  # 95% of 60, with some spread
    # Ten copies of a value in a cluster are one observation, not ten.
    few = [source.gauss(0, 1) for _ in range(12)]
    wide, _ = bootstrap([10 * x for x in few], [10] * 12)
    many, _ = bootstrap([x for x in few for _ in range(10)], [1] * 120)
    assert wide.value == pytest.approx(many.value)
    assert wide.high - wide.low > 2 * (many.high - many.low)


def test_bootstrap_refuses_nothing():
    with pytest.raises(InputError, match="needs clusters"):
        bootstrap([], [])
    with pytest.raises(InputError, match="needs clusters"):
        bootstrap([1.0], [0])


def test_same_answers_are_not_distinguishable():
    right = [True, False, True, True]
    test = paired_answers(right, right, [0, 0, 1, 1])
    assert (test.difference, test.p, test.only_raw, test.only_this) == (0.0, 1.0, 0, 0)
    assert verdict(test.difference, test.p) == NOT_DISTINGUISHABLE


def test_a_few_lost_answers_are_not_distinguishable_and_many_are():
    raw = [True] * 40
    clusters = [i // 2 for i in range(40)]
    few = paired_answers(raw, [i not in (3, 20) for i in range(40)], clusters)
    assert few.difference == -0.05
    assert few.low <= few.difference <= few.high
    assert verdict(few.difference, few.p) == NOT_DISTINGUISHABLE
    many = paired_answers(raw, [i % 2 == 0 for i in range(40)], clusters)
    assert verdict(many.difference, many.p) == "worse"
    assert (many.only_raw, many.only_this) == (20, 0)


def test_one_bad_context_is_one_observation():
    """McNemar's test alone would report a difference if 8 answers of a single context are lost."""
    raw = [True] * 80
    other = [i >= 8 for i in range(80)]
    assert mcnemar(8, 0) < 0.01
    test = paired_answers(raw, other, [i // 8 for i in range(80)])
    assert verdict(test.difference, test.p) == NOT_DISTINGUISHABLE


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_verdict_says_which_way():
    assert verdict(0.1, 0.01) == "better"
    assert verdict(0.1, 0.01, higher_is_better=False) == "worse"
    assert verdict(0.1, math.nextafter(0.05, 1)) == NOT_DISTINGUISHABLE


def test_the_interval_of_a_mean_over_tokens():
    """Losses are equal within a block, so there are only as many independent observations as blocks."""
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randn(8, generator=generator).repeat_interleave(128) for _ in range(8)]
    found, p = mean_over_tokens(windows)
    assert p > 0.05
    assert mean_over_tokens([window + 5 for window in windows])[1] < 0.001
    assert mean_over_tokens([0 * window for window in windows])[1] == 1
    half = 1.96 * torch.cat(windows).std() / 64**0.5
    assert found.value == pytest.approx(float(torch.cat(windows).mean()))
    assert found.high - found.value == pytest.approx(float(half), rel=0.15)
    assert found.value - found.low == pytest.approx(float(half), rel=0.15)
