"""Lloyd-Max levels of up to 4 bits as operands of 8-bit tensor cores: keys as int8, values as e4m3.

* Keys: levels are odd multiples of 1/2, at most 63.5. Twice a level fits a signed byte exactly.
* Values: e4m3 has four significant bits. One factor per codebook minimises the rounding error, which
  increases the squared error of 4-bit codes by 1.3%, and that of narrower codes by less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from slimkv.codec.codebook import codebook, positive_moments
from slimkv.errors import SpecError

MOST_BITS = 4
E4M3_LARGEST = 448.0
_LARGEST_LEVEL = 240.0  # scaled to e4m3; halving the factor would repeat the same mantissas


def e4m3(x: np.ndarray) -> np.ndarray:
    """``x``, of magnitudes up to 448, rounded to e4m3 (ties to even), as float64."""
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(torch.float8_e4m3fn).double().numpy()


def byte_words(entries: list[int], *, signed: bool = False) -> tuple[int, int]:
    """The first eight of these bytes as two words; missing ones are zeros."""
    low, high = (bytes([*entries, *[0] * 8])[at : at + 4] for at in (0, 4))
    return int.from_bytes(low, "little", signed=signed), int.from_bytes(high, "little", signed=signed)


@dataclass(frozen=True)
class ByteLevels:
    """The levels of one codebook, by code."""

    key: np.ndarray  # int64 [2 ** bits]: twice the level, odd, -127..127
    value: np.ndarray  # float64 [2 ** bits]: exact in e4m3
    value_factor: float  # float32: a level is approximately ``value / value_factor``


@cache
def byte_levels(bits: int, dim: int) -> ByteLevels:
    """The byte levels of the codebook of ``bits`` (1-4) for rotated vectors of ``dim`` dimensions."""
    if not 1 <= bits <= MOST_BITS:
        raise SpecError(f"levels of {bits} bits do not fit bytes; use 1 to {MOST_BITS} bits")
    book = codebook(bits, dim)
    positive = book.levels[len(book.levels) // 2 :]
    mass = positive_moments(positive / book.unit, dim)[0]
    tops = np.arange(_LARGEST_LEVEL / 2, _LARGEST_LEVEL, 1 / 32)
    factors = (tops / positive[-1]).astype(np.float32).astype(np.float64)
    errors = (e4m3(positive * factors[:, None]) / factors[:, None] - positive) / book.unit
    distortions = (mass * errors**2).sum(1)
    best = int(np.argmax(distortions < distortions.min() + 1e-10))  # the first minimum, whatever libm rounds
    levels, factor = book.levels_by_code, float(factors[best])
    return ByteLevels(np.rint(2 * levels).astype(np.int64), e4m3(levels * factor), factor)
