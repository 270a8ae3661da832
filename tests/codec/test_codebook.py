import math

import numpy as np
import pytest
import torch

from slimkv import CodecSpec
from slimkv.codec.codebook import LEVEL_DENOMINATOR, codebook, expected_distortion
from slimkv.codec.codec import Codec
from slimkv.errors import SpecError

DIMS = (16, 64, 80, 96, 128, 192, 256, 576, 1024)
CASES = [(bits, dim) for bits in range(1, 9) for dim in DIMS]


def fine_grid(dim, points=400_001):
    """A fine grid and a coordinate's density on it, for an integration that differs from the solver's."""
    end = min(math.sqrt(dim), 9.0)
    x = np.linspace(-end, end, points)
    weight = np.clip(1 - x * x / dim, 0, None) ** ((dim - 3) / 2)
    return x, weight / weight.sum()


@pytest.mark.parametrize(("bits", "dim"), [(b, d) for b, d in CASES if b <= 6])
def test_exact_levels_satisfy_lloyd_conditions(bits, dim):
    levels = codebook(bits, dim).exact_levels
    x, weight = fine_grid(dim)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    mass = np.bincount(cell, weight, len(levels))
    mean = np.bincount(cell, weight * x, len(levels)) / mass
    assert np.allclose(mean, levels, rtol=0, atol=5e-5)
    assert np.allclose(levels, -levels[::-1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(("bits", "dim"), CASES)
def test_the_grid_loses_little(bits, dim):
    loss = expected_distortion(bits, dim) / expected_distortion(bits, dim, exact=True) - 1
    assert -1e-9 < loss < (0.0065 if dim < 64 else 0.004 if bits == 4 else 0.001)


@pytest.mark.parametrize(("bits", "dim"), CASES)
def test_stored_levels_are_on_the_grid(bits, dim):
    book = codebook(bits, dim)
    assert np.all(np.diff(book.levels) > 0)
    assert np.array_equal(book.levels, -book.levels[::-1])
    assert np.array_equal(book.levels * LEVEL_DENOMINATOR, np.round(book.levels * LEVEL_DENOMINATOR))
    assert np.array_equal(book.levels.astype(np.float16), book.levels)
    if bits <= 4:
        assert np.all(book.levels % 1 == 0.5)
        assert book.levels[-1] <= 63.5
    assert np.array_equal(book.boundaries, (book.levels[1:] + book.levels[:-1]) / 2)
    assert np.array_equal(book.boundaries.astype(np.float32), book.boundaries)
    assert book.unit == np.float32(book.unit)


def test_in_many_dimensions_the_levels_are_the_gaussian_ones():
    # Max (1960), tables of optimum levels: 4 and 8 levels.
    assert np.allclose(codebook(2, 10**8).exact_levels[2:], [0.4528, 1.510], atol=5e-4)
    assert np.allclose(codebook(3, 10**8).exact_levels[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)


def test_codes_are_sign_and_magnitude():
    for bits in range(1, 9):
        by_code = codebook(bits, 128).levels_by_code
        half = 2 ** (bits - 1)
        assert np.all(by_code[:half] < 0)
        assert np.array_equal(by_code[half:], -by_code[:half])
        assert np.all(np.diff(by_code[half:]) > 0)


def test_a_value_on_a_boundary_takes_the_lower_level():
    """At 1 bit, the boundary is 0. Exact zeros of a rotated vector lie on it, and take the negative level."""
    codec = Codec(CodecSpec.parse("k1v1", 64))
    x = torch.zeros(64)
    x[0] = x[1] = 1.0
    rotated = codec.rotate_query(x)
    on_boundary = rotated == 0
    assert 0 < on_boundary.sum() < 64
    codes = codec.encode_key(x).codes
    assert (codes[on_boundary] == 0).all()
    assert torch.equal(codes[~on_boundary] == 1, rotated[~on_boundary] > 0)


@pytest.mark.parametrize("bits", range(1, 9))
def test_boundaries_break_ties_downwards_to_the_last_bit(bits):
    """The same search as the encoder's, at every boundary and one float32 step to either side of it."""
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", 128))
    edges = codec.key_tables.boundaries
    up = torch.nextafter(edges, torch.tensor(torch.inf))
    down = torch.nextafter(edges, torch.tensor(-torch.inf))
    order = torch.arange(len(edges))
    for values, expected in ((down, order), (edges, order), (up, order + 1)):
        assert torch.equal(torch.bucketize(values, codec.key_tables.boundaries), expected)


@pytest.mark.parametrize("bits", [0, 9])
def test_widths_outside_1_to_8_are_refused(bits):
    with pytest.raises(SpecError, match=f"not {bits}"):
        codebook(bits, 128)
