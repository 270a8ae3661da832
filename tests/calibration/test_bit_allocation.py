"""Predicted costs of errors, and the widths chosen by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from slimkv import Codec
from slimkv.calibration.bit_allocation import (
    WIDTHS,
    believed_costs,
    budget_bytes,
    format_of,
    layer_bytes,
    profile_bytes,
    solve_widths,
)
from slimkv.calibration.predict import logit_noise, predicted_cost
from slimkv.errors import InputError, UnsupportedError


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_predicted_noise_is_what_the_codec_makes(calibration, bits):
    """E(q.e)^2 of actual codes is close to the prediction, with and without query-aware rounding."""
    statistics = calibration.layers[0]
    codec = Codec.from_format(f"k{bits}v4", 32)
    keys = torch.randn(4000, 2, 32, generator=torch.Generator().manual_seed(0))
    for query_aware in (None, calibration.query_aware_matrices(0, codec)):
        error = (codec.decode_key(codec.encode_key(keys, query_aware=query_aware)) - keys).double()
        seen = torch.einsum("nhi,hij,nhj->nh", error, statistics.query_moment, error) / keys.square().sum(-1)
        distortion = predicted_cost(calibration, 0, bits, "value") / float(statistics.value_weight.sum())
        predicted = distortion * logit_noise(statistics, codec.spec.seed, query_aware=query_aware is not None)
        assert seen.mean(0).tolist() == pytest.approx(predicted.tolist(), rel=0.12)


def test_costs_fall_with_bits_and_follow_the_weights(calibration):
    for side in ("key", "value"):
        costs = [predicted_cost(calibration, 1, bits, side) for bits in WIDTHS]
        assert costs == sorted(costs, reverse=True)
    assert predicted_cost(calibration, 2, 4, "value") == pytest.approx(10 * predicted_cost(calibration, 1, 4, "value"))


def cost_of_one_width(calibration, bits):
    return sum(cost for (_, _, width), cost in believed_costs(calibration).items() if width == bits)


def test_sensitive_layers_get_the_bits(calibration):
    solution = solve_widths(calibration, profile_bytes(calibration, "balanced"))
    widths = [c.key_bits + c.value_bits for c in solution.choices]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    assert solution.bytes_per_token <= profile_bytes(calibration, "balanced")
    assert solution.cost < cost_of_one_width(calibration, 4)
    assert solution.formats[2] == format_of(solution.choices[2].key_bits, solution.choices[2].value_bits)


@pytest.mark.parametrize("bits_per_number", [3.0, 4.1, 5.5])
def test_no_other_choice_is_cheaper(calibration, bits_per_number):
    """Compares with every choice for two layers. All bits cost the same, so the greedy search finds the optimum."""
    two = replace(calibration, layers={n: calibration.layers[n] for n in (0, 1)})
    budget = budget_bytes(two, bits_per_number)
    solution = solve_widths(two, budget)
    costs = believed_costs(two)
    best = min(
        costs[0, "key", a] + costs[0, "value", b] + costs[1, "key", c] + costs[1, "value", d]
        for a, b, c, d in product(WIDTHS, repeat=4)
        if layer_bytes(two.layers[0], format_of(a, b)) + layer_bytes(two.layers[1], format_of(c, d)) <= budget
    )
    assert solution.cost == pytest.approx(best)
    assert solution.bits_per_number <= bits_per_number


def test_a_large_budget_buys_the_largest_widths(calibration):
    solution = solve_widths(calibration, 1e9)
    assert {(c.key_bits, c.value_bits) for c in solution.choices} == {(WIDTHS[-1], WIDTHS[-1])}
    assert solution.cost == pytest.approx(cost_of_one_width(calibration, WIDTHS[-1]))


def test_impossible_wishes_are_named(calibration):
    with pytest.raises(InputError, match=r"2.000 bits per value is less than 2-bit codes and their scales need: 2.500"):
        solve_widths(calibration, budget_bytes(calibration, 2.0))
    with pytest.raises(InputError, match="unknown profile 'best'; known are lossless, balanced, aggressive"):
        profile_bytes(calibration, "best")
    bare = {n: replace(x, key_weight=None) for n, x in calibration.layers.items()}
    with pytest.raises(UnsupportedError, match="has no error costs for layer 0"):
        solve_widths(replace(calibration, layers=bare), 1e9)


def test_layers_that_forget_do_not_pay_for_those_that_do_not(calibration):
    """The layers of each sliding window take no more bytes than at one common width: the budget holds at any length."""
    windows = {0: 512, 1: None, 2: 512}
    layers = {n: replace(x, sliding_window=windows[n]) for n, x in calibration.layers.items()}
    mixed = replace(calibration, layers=layers)
    solution = solve_widths(mixed, profile_bytes(mixed, "balanced"))
    for window in (512, None):
        numbers = [n for n in layers if windows[n] == window]
        spent = sum(layer_bytes(layers[n], solution.formats[n]) for n in numbers)
        allowed = sum(layer_bytes(layers[n], "k4v4") for n in numbers)
        assert spent <= allowed + 1e-6
        assert spent > 0.9 * allowed
    assert solution.formats[1] == "k4v4" or solution.choices[1].key_bits + solution.choices[1].value_bits == 8
