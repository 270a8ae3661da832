"""The rotation: random signs, then a Hadamard matrix of the head size.

A Hadamard matrix has entries +1 and -1 and orthogonal rows, so rotating integers gives integers, and the result does
not depend on the device or the order of summation. Powers of two come from Sylvester's doubling; other sizes from
Paley's two constructions, doubled repeatedly (80 = 4 x 20, 96 = 8 x 12, 576 = 16 x 36, ...). The few multiples
of 16 for which neither construction exists (688 is the first) use a block-diagonal matrix of equal power-of-two blocks.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from slimkv.errors import SpecError


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % p for p in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """Q[i, j] = Legendre symbol of i - j modulo the prime q."""
    symbol = -np.ones(q, dtype=np.int64)
    symbol[np.arange(1, q) ** 2 % q] = 1
    symbol[0] = 0
    i = np.arange(q)
    return symbol[(i[:, None] - i[None, :]) % q]


def _paley(order: int) -> np.ndarray | None:
    """A Hadamard matrix of ``order`` by Paley's first or second construction, or None."""
    if order % 4:
        return None
    q = order - 1
    if _is_prime(q):  # q = 3 mod 4, since the order is divisible by 4
        core = np.ones((order, order), dtype=np.int64)
        core[1:, 1:] = _jacobsthal(q) + np.eye(q, dtype=np.int64)
        core[1:, 0] = -1
        return core
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        conference = np.ones((q + 1, q + 1), dtype=np.int64)
        conference[0, 0] = 0
        conference[1:, 1:] = _jacobsthal(q)
        diagonal = np.eye(q + 1, dtype=np.int64)
        plus = np.array([[1, 1], [1, -1]])
        minus = np.array([[1, -1], [-1, -1]])
        return np.kron(conference, plus) + np.kron(diagonal, minus)
    return None


@cache
def _hadamard(order: int) -> np.ndarray | None:
    if order == 1:
        return np.ones((1, 1), dtype=np.int64)
    if order & (order - 1):
        direct = _paley(order)
        half = _hadamard(order // 2) if order % 2 == 0 else None
        if half is None:
            return direct
    else:
        half = _hadamard(order // 2)
    return np.kron(np.array([[1, 1], [1, -1]]), half)


def block_size(dim: int) -> int:
    """Size of the Hadamard blocks in the rotation of ``dim``: ``dim`` itself for nearly every size."""
    return dim if _hadamard(dim) is not None else dim & -dim


def core_size(dim: int) -> int:
    """Size of the matrix that is doubled repeatedly to form a block of the rotation: 1 for powers of two, 12 for 96."""
    size = block_size(dim)
    while size % 2 == 0 and _hadamard(size // 2) is not None:
        size //= 2
    return size


@cache
def signed_hadamard(dim: int, seed: int) -> np.ndarray:
    """The rotation without normalisation: int8 [dim, dim] of +-1 (and 0 between blocks).

    A vector x (as a row) rotates to ``x @ signed_hadamard / sqrt(block_size(dim))``.
    """
    if dim < 1:
        raise SpecError(f"head_dim {dim} is not positive")
    block = block_size(dim)
    core = _hadamard(block)
    assert core is not None
    as_float = core.astype(np.float64)  # float64 products are exact for these integers, and much faster
    if not np.array_equal(as_float @ as_float.T, block * np.eye(block)):
        raise AssertionError(f"the Hadamard construction of order {block} is wrong")
    matrix = np.kron(np.eye(dim // block, dtype=np.int64), core)
    signs = sign_bits(dim, seed)
    out = (signs[:, None] * matrix).astype(np.int8)
    out.setflags(write=False)
    return out


def sign_bits(dim: int, seed: int) -> np.ndarray:
    """The random signs: int64 [dim] of +-1 from splitmix64, the same in every numpy version."""
    start = np.uint64(seed * (dim + 1) & 0xFFFFFFFFFFFFFFFF)
    state = np.arange(1, dim + 1, dtype=np.uint64) + start
    state = state * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return np.where(state & np.uint64(1), 1, -1).astype(np.int64)


@cache
def sign_words(dim: int, seed: int) -> tuple[int, ...]:
    """``sign_bits`` as 32-bit words; a set bit is -1."""
    negative = sum(1 << i for i, sign in enumerate(sign_bits(dim, seed).tolist()) if sign < 0)
    return tuple((negative >> first) & 0xFFFFFFFF for first in range(0, dim, 32))


def core_matrix(dim: int) -> np.ndarray:
    """The matrix that is doubled repeatedly to form a block of the rotation: int64 [core_size, core_size] of +-1."""
    core = _hadamard(core_size(dim))
    assert core is not None
    return core


def core_words(dim: int, columns: bool) -> tuple[int, ...]:
    """Rows or columns of ``core_matrix`` as words, where a set bit is -1; empty beyond 32 rows."""
    core = core_matrix(dim)
    if len(core) > 32:
        return ()
    negative = (core.T if columns else core) < 0
    return tuple(sum(1 << i for i in np.flatnonzero(row).tolist()) for row in negative)
