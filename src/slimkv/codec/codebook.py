"""Lloyd-Max codebooks for one coordinate of a rotated unit vector, scaled to unit variance.

The density of that coordinate in d dimensions is proportional to (1 - x^2 / d)^((d - 3) / 2). The optimal levels are
computed in float64 and then rounded to a grid that every implementation represents exactly:

* up to 4 bits, levels are odd multiples of 1/2 up to 63.5, so twice a level fits seven bits: kernels look it up with a
  byte permutation and negate it with an exclusive or. The grid unit minimises the loss, which is at most 0.4% of the
  error for head sizes of 64 or more;
* from 5 bits on, levels are fp16 numbers that are multiples of 1/128.

``unit`` is the number of grid units in one standard deviation. Levels times ``LEVEL_DENOMINATOR`` are integers.

Tie rule, for every implementation: a value exactly on a boundary takes the lower of the two levels.

Codes are sign and magnitude: the top bit is set for positive levels, the low bits number magnitudes in ascending order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from slimkv.errors import SpecError

LEVEL_DENOMINATOR = 128
_GRID_BITS = 4
_FINE_UNIT = 32.0


@dataclass(frozen=True)
class Codebook:
    """Levels and decision boundaries in grid units, ascending, as float64."""

    bits: int
    dim: int
    unit: float
    levels: np.ndarray  # [2 ** bits]
    boundaries: np.ndarray  # [2 ** bits - 1], the midpoints of the levels
    exact_levels: np.ndarray  # [2 ** bits], Lloyd-Max levels in standard deviations, before the grid

    @property
    def levels_by_code(self) -> np.ndarray:
        """Levels indexed by sign-and-magnitude code."""
        half = len(self.levels) // 2
        return np.concatenate([self.levels[:half][::-1], self.levels[half:]])

    @property
    def error_steps(self) -> float:
        """Steps per grid unit for stored rounding errors, a power of two: typical errors are 8 to 20 steps."""
        spacing = float(self.levels[-1] - self.levels[0]) / (len(self.levels) - 1)
        return 2.0 ** math.floor(math.log2(64 / spacing))


def _density(x: np.ndarray, dim: int) -> np.ndarray:
    outside = np.clip(x * x / dim, 0.0, 1.0 - 1e-16)
    return np.exp((dim - 3) / 2 * np.log1p(-outside))  # log1p stays accurate in many dimensions


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(48)


def _cell_moments(edges: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integrals of f, x f and x^2 f over consecutive cells, by 48-point Gauss-Legendre quadrature."""
    nodes, weights = _quadrature()
    mid, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    x = mid[:, None] + half[:, None] * nodes
    f = _density(x, dim) * (weights * half[:, None])
    return f.sum(1), (f * x).sum(1), (f * x * x).sum(1)


def _solve_positive(bits: int, dim: int) -> np.ndarray:
    """The positive half of the Lloyd-Max levels, in standard deviations: Newton's method on 'level = cell mean'."""
    count = 2 ** (bits - 1)
    end = min(np.sqrt(dim), 9.0)
    grid = np.linspace(0.0, end, 20001)
    third = np.cumsum(_density(grid, dim) ** (1 / 3))  # the optimal point density is f^(1/3)
    levels = np.interp((np.arange(count) + 0.5) / count * third[-1], third, grid)
    for _ in range(100):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [end]])
        mass, first, _ = _cell_moments(edges, dim)
        mean = first / mass
        at_edge = _density(edges, dim)
        by_low = at_edge[:-1] * (mean - edges[:-1]) / mass  # derivatives of the cell mean with respect to its edges
        by_high = at_edge[1:] * (edges[1:] - mean) / mass
        by_low[0] = by_high[-1] = 0.0  # those two edges are fixed
        jacobian = np.diag(1 - (by_low + by_high) / 2)
        jacobian -= np.diag(by_high[:-1] / 2, 1) + np.diag(by_low[1:] / 2, -1)
        step = np.linalg.solve(jacobian, mean - levels)
        new = levels + step
        levels = new if new[0] > 0 and np.all(np.diff(new) > 0) and new[-1] < end else mean
        if np.abs(step).max() < 1e-13:
            return levels
    raise AssertionError(f"the codebook of {bits} bits for {dim} dimensions did not converge")


def positive_moments(levels: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``_cell_moments`` of the cells around positive ``levels``, divided by the mass of the positive half."""
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [min(np.sqrt(dim), 9.0)]])
    mass, first, second = _cell_moments(edges, dim)
    return mass / mass.sum(), first / mass.sum(), second / mass.sum()


def _distortion(levels: np.ndarray, dim: int) -> float:
    """Mean squared error of a unit-variance coordinate with these positive levels and their negatives."""
    mass, first, second = positive_moments(levels, dim)
    return float((second - 2 * levels * first + levels**2 * mass).sum())


def _on_byte_grid(levels: np.ndarray, dim: int) -> tuple[float, np.ndarray]:
    """The unit with the least distortion, and ``levels`` rounded to odd multiples of half of it."""
    best = (np.inf, levels)
    for top in np.arange(48.0, 63.51, 0.0625):
        unit = top / levels[-1]
        rounded = np.clip(np.floor(levels * unit) + 0.5, 0.5, 63.5)
        distortion = _distortion(rounded / unit, dim)
        if distortion < best[0] - 1e-10:  # by more than the rounding of libm, which differs between machines
            best = (distortion, rounded)
    # The unit with the least error for these levels, rounded so that float32 and decimal text represent it exactly.
    mass, first, _ = positive_moments(best[1] * levels[-1] / best[1][-1], dim)
    unit = float((mass * best[1] ** 2).sum() / (best[1] * first).sum())
    return float(np.float32(round(unit * 1024) / 1024)), best[1]


@cache
def codebook(bits: int, dim: int) -> Codebook:
    """The codebook of ``bits`` (1-8) for rotated vectors of ``dim`` dimensions; solved once per process."""
    if not 1 <= bits <= 8:
        raise SpecError(f"Lloyd-Max codebooks have 1 to 8 bits, not {bits}")
    positive = _solve_positive(bits, dim)
    if bits <= _GRID_BITS:
        unit, grid = _on_byte_grid(positive, dim)
    else:  # fp16
        halves = (positive * _FINE_UNIT).astype(np.float16).astype(np.float64)
        unit, grid = _FINE_UNIT, np.round(halves * LEVEL_DENOMINATOR) / LEVEL_DENOMINATOR
    if np.any(np.diff(grid) <= 0):
        raise AssertionError(f"levels of {bits} bits collapse on the grid")
    levels = np.concatenate([-grid[::-1], grid])
    exact = np.concatenate([-positive[::-1], positive])
    return Codebook(bits, dim, unit, levels, (levels[1:] + levels[:-1]) / 2, exact)


def expected_distortion(bits: int, dim: int, exact: bool = False) -> float:
    """Mean squared error of a unit-variance coordinate, by quadrature, for the stored levels or for the exact ones."""
    book = codebook(bits, dim)
    levels = book.exact_levels if exact else book.levels / book.unit
    return _distortion(levels[len(levels) // 2 :], dim)
