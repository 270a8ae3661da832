"""Query-aware rounding: less error in the directions of queries, at a known cost in others, with the same decoder."""

from __future__ import annotations

import math

import pytest
import torch

from slimkv.codec import Codec
from slimkv.codec.query_aware import (
    LARGEST_BYTE,
    WEIGHT_STEPS,
    query_aware_index,
    query_aware_matrix,
    unit_triangular,
)
from slimkv.errors import InputError

DIM = 64


def skewed_moment(seed: int, heads: int | None = None, dim: int = DIM) -> torch.Tensor:
    """Second moments of queries concentrated in a few directions: eigenvalues fall from 1 to 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    shape = (dim, dim) if heads is None else (heads, dim, dim)
    basis = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -3, dim, dtype=torch.float64)) @ basis.mT


def errors(codec: Codec, x: torch.Tensor, query_aware: torch.Tensor | None) -> torch.Tensor:
    return (codec.decode_key(codec.encode_key(x, query_aware=query_aware)) - x).double()


def keys(count: int = 2000, *shape: int, dim: int = DIM) -> torch.Tensor:
    return torch.randn(count, *shape, dim, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_the_error_that_queries_see_falls(bits):
    codec, x = Codec.from_format(f"k{bits}v4", DIM), keys()
    moment = skewed_moment(0)
    shaped = errors(codec, x, query_aware_matrix(moment, codec.key_rotation))
    plain = errors(codec, x, None)
    seen = [torch.einsum("ni,ij,nj->", e, moment, e) for e in (shaped, plain)]
    assert seen[0] < 0.6 * seen[1]


def isotropic_cost(query_aware: torch.Tensor) -> torch.Tensor:
    """The factor by which a rounding matrix increases the squared error of a key, as isotropic queries see it.

    The errors e solve L' e = w, where w has the size of plain rounding errors, so the factor is the mean squared
    norm of the columns of the inverse of L. int8 [..., dim, dim] -> float64 [...].
    """
    identity = torch.eye(query_aware.shape[-1], dtype=torch.float64, device=query_aware.device).expand(
        query_aware.shape
    )
    upper = query_aware.double().triu(1) / WEIGHT_STEPS + identity
    inverse = torch.linalg.solve_triangular(upper, identity, upper=True, unitriangular=True)
    return inverse.square().sum((-2, -1)) / query_aware.shape[-1]


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_queries_of_no_direction_pay_no_more_than_stated(bits):
    codec, x = Codec.from_format(f"k{bits}v4", DIM), keys()
    query_aware = query_aware_matrix(skewed_moment(0), codec.key_rotation)
    ratio = errors(codec, x, query_aware).square().sum() / errors(codec, x, None).square().sum()
    price = isotropic_cost(query_aware)
    assert 1 < price < 2
    assert ratio < 1.1 * price


def test_the_price_of_no_corrections_is_none():
    assert isotropic_cost(torch.zeros(DIM, DIM, dtype=torch.int8)) == 1


def test_isotropic_queries_change_nothing():
    codec, x = Codec.from_format("k4v4", DIM), keys(200)
    query_aware = query_aware_matrix(3 * torch.eye(DIM), codec.key_rotation)
    plain, shaped = codec.encode_key(x), codec.encode_key(x, query_aware=query_aware)
    assert torch.equal(plain.codes, shaped.codes)
    assert torch.equal(plain.fields, shaped.fields)
    assert not query_aware.any()


def test_each_head_has_its_own_matrix():
    codec, x = Codec.from_format("k4v4", DIM), keys(50, 3)
    query_aware = query_aware_matrix(skewed_moment(2, heads=3), codec.key_rotation)
    together = codec.encode_key(x, query_aware=query_aware)
    for head in range(3):
        alone = codec.encode_key(x[:, head], query_aware=query_aware[head])
        assert torch.equal(together.codes[:, head], alone.codes)
        assert torch.equal(together.fields[:, head], alone.fields)


def test_a_vector_is_rounded_alike_in_any_batch():
    codec, x = Codec.from_format("k3v3", 80), keys(64, dim=80)
    query_aware = query_aware_matrix(skewed_moment(3, dim=80), codec.key_rotation)
    whole = codec.encode_key(x, query_aware=query_aware).codes
    parts = [codec.encode_key(part, query_aware=query_aware).codes for part in x.split([1, 13, 50])]
    assert torch.equal(whole, torch.cat(parts))


def test_the_corrections_are_those_of_the_formula():
    """Compares with the formula in float64: each level is the nearest one, up to the rounding of errors to steps."""
    generator = torch.Generator().manual_seed(4)
    levels, boundaries, steps = torch.tensor([-3.0, -1.0, 1.0, 3.0]), torch.tensor([-2.0, 0.0, 2.0]), 32.0
    y = torch.randn(5, 8, generator=generator)
    query_aware = torch.randint(-40, 41, (8, 8), generator=generator, dtype=torch.int8)
    got = levels[query_aware_index(y, levels, boundaries, query_aware, steps)]
    for row, chosen in zip(y.double(), got.double(), strict=True):
        error = chosen - row
        for i in range(8):
            target = row[i] - (query_aware.double()[i, i + 1 :] / WEIGHT_STEPS * error[i + 1 :]).sum()
            slack = query_aware.double()[i, i + 1 :].abs().sum() / WEIGHT_STEPS / (2 * steps) + 1e-6
            assert (chosen[i] - target).abs() <= (levels.double() - target).abs().min() + 2 * slack


def test_the_bytes_of_the_matrix_are_the_factor():
    moment, rotation = skewed_moment(5), Codec.from_format("k4v4", DIM).key_rotation
    factor = unit_triangular(moment, rotation)
    assert torch.equal(factor.diagonal(), torch.ones(DIM, dtype=torch.float64))
    assert not factor.triu(1).any()
    off = query_aware_matrix(moment, rotation).double() / WEIGHT_STEPS - factor.mT.triu(1)
    assert off.abs().max() <= 0.5 / WEIGHT_STEPS


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", [16, 64, 128, 1024])
def test_sums_of_corrections_are_exact_and_errors_fit_a_byte(bits, dim):
    assert dim * LARGEST_BYTE**2 < 2**24
    tables = Codec.from_format(f"k{bits}v4", dim).key_tables
    spacing = tables.boundaries.diff().median() if bits > 1 else 2 * tables.levels.max()
    assert 8 < spacing * tables.error_steps / 2 <= LARGEST_BYTE
    assert math.log2(tables.error_steps) % 1 == 0


def test_zero_vectors_stay_zero():
    codec = Codec.from_format("k4v4", DIM)
    query_aware = query_aware_matrix(skewed_moment(0), codec.key_rotation)
    assert codec.decode_key(codec.encode_key(torch.zeros(3, DIM), query_aware=query_aware)).abs().max() == 0


def test_no_queries_at_all_is_plain_rounding():
    codec = Codec.from_format("k4v4", DIM)
    assert not query_aware_matrix(torch.zeros(DIM, DIM), codec.key_rotation).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second_moment": torch.eye(32)}, r"must be \[64, 64\]"),
        ({"second_moment": torch.full((DIM, DIM), torch.nan)}, "NaN or Inf"),
        ({"second_moment": torch.diag(torch.linspace(-40, 60, DIM))}, "not positive semidefinite"),
        ({"damping": 0.0}, "damping must be positive"),
    ],
)
def test_moments_that_are_none_are_refused(change, message):
    codec = Codec.from_format("k4v4", DIM)
    arguments = {"second_moment": torch.eye(DIM), "rotation": codec.key_rotation, **change}
    with pytest.raises(InputError, match=message):
        query_aware_matrix(**arguments)


@pytest.mark.parametrize(
    ("format", "query_aware", "message"),
    [
        ("turboquant_k8v4", torch.zeros(DIM, DIM, dtype=torch.int8), "needs Lloyd-Max keys; the key format is fp8"),
        ("k4v4", torch.zeros(32, 32, dtype=torch.int8), "must be int8 and broadcast"),
        ("k4v4", torch.eye(DIM), "must be int8"),
        ("k4v4", torch.zeros(5, DIM, DIM, dtype=torch.int8), "broadcast"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(format, query_aware, message):
    with pytest.raises(InputError, match=message):
        Codec.from_format(format, DIM).encode_key(keys(4, 3), query_aware=query_aware)
