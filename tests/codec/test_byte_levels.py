"""Levels of keys as int8 and of values as e4m3."""

from __future__ import annotations

import numpy as np
import pytest

from slimkv.codec.byte_levels import byte_levels, e4m3
from slimkv.codec.codebook import codebook, expected_distortion, positive_moments
from slimkv.errors import SpecError


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels(bits, dim):
    levels, book = byte_levels(bits, dim), codebook(bits, dim)
    assert np.array_equal(levels.key, 2 * book.levels_by_code)
    assert np.abs(levels.key).max() <= 127
    assert np.array_equal(levels.value, e4m3(levels.value)), "not numbers of e4m3"
    assert np.array_equal(levels.value, -levels.value[[i ^ (1 << (bits - 1)) for i in range(1 << bits)]])
    assert np.abs(levels.value).max() <= 240
    # Rounding levels to e4m3 adds little to the error of the codes.
    half = 1 << (bits - 1)
    errors = (levels.value / levels.value_factor - book.levels_by_code)[half:] / book.unit
    mass = positive_moments(book.levels[half:] / book.unit, dim)[0]
    assert (mass * errors**2).sum() < 0.02 * expected_distortion(bits, dim)


def test_more_bits_are_refused():
    with pytest.raises(SpecError, match="levels of 5 bits do not fit bytes"):
        byte_levels(5, 64)
