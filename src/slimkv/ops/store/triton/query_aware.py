"""Triton functions that choose levels, nearest or query-aware, byte for byte like the reference.

Rounding goes from the last coordinate to the first, in slices of 16. A tensor-core product corrects a whole slice for
the errors of later slices. Within a slice, the rows of 16 coordinates are split into 16 columns, so that the sequential
part is arithmetic on registers. All sums are sums of integers below 2^24: exact in any order.
"""

# mypy: disable-error-code="assignment"
# Tuples of tensors grow here while Triton unrolls a loop.

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec.quantize import ROUND_MAGIC
from slimkv.codec.query_aware import LARGEST_BYTE, WEIGHT_STEPS

_MAGIC: tl.constexpr = tl.constexpr(ROUND_MAGIC)
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)  # the bits of _MAGIC; adding n to them adds n to the number
_LARGEST: tl.constexpr = tl.constexpr(float(LARGEST_BYTE))
_WEIGHT_STEPS: tl.constexpr = tl.constexpr(WEIGHT_STEPS)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tree(a, bounds, entries, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """entries[FIRST + i], where i of the COUNT - 1 boundaries from FIRST on lie below a: a tree of comparisons."""
    if COUNT == 1:
        return tl.zeros_like(a) + tl.load(entries + FIRST)
    else:
        HALF: tl.constexpr = COUNT // 2
        upper = a > tl.load(bounds + FIRST + HALF - 1)
        return tl.where(upper, tree(a, bounds, entries, FIRST + HALF, HALF), tree(a, bounds, entries, FIRST, HALF))


@triton.jit
def crossing(x):
    """|x| as int32, larger than the bits of a boundary if and only if x crosses it.

    A negative value counts as the next larger float, so it crosses a boundary that it lies on.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFFFF) + ((bits >> 31) & 1)


@triton.jit
def crossing_of_product(x, y, product):
    """`crossing` of the exact x * y, y > 0; product: x * y rounded to float32.

    If the rounded product lies on a boundary, its rounding error decides.
    """
    if _INTERPRETED:  # the interpreter's fma rounds twice; float64 is exact here
        rest = (x.to(tl.float64) * y.to(tl.float64) - product.to(tl.float64)).to(tl.float32)
    else:
        rest = tl.fma(x, y, -product)
    bits = product.to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFFFF) + ((rest > 0) ^ (bits < 0)).to(tl.int32)


@triton.jit
def _index(a, bounds, BITS: tl.constexpr):
    """The number of boundaries below a, by bisection in BITS - 1 steps: int32."""
    index = tl.zeros_like(a)
    for i in tl.static_range(BITS - 1):
        index += tl.where(a > tl.load(bounds + index + ((1 << (BITS - 2 - i)) - 1)), 1 << (BITS - 2 - i), 0)
    return index


@triton.jit
def magnitude(a, bounds, entries, BITS: tl.constexpr):
    """The index and the entry of the level that a coordinate with the `crossing` a rounds to: int32 each.

    A value on a boundary takes the lower level. Up to 4 bits, an entry has the index above its low 16 bits.
    """
    if BITS <= 4:
        both = tree(a, bounds, entries, 0, 1 << (BITS - 1))
        return both >> 16, both & 0xFFFF
    else:
        index = _index(a, bounds, BITS)
        return index, tl.load(entries + index)


@triton.jit
def _as_float(byte):
    """int8 -> float32 by an addition, which runs at eight times the rate of a GPU's conversion."""
    return (byte.to(tl.int32) + _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def _level(x, bounds, levels, BITS: tl.constexpr):
    """The level that x rounds to: float32; levels: pointer to the positive ones."""
    a = crossing(x)
    if BITS <= 4:
        found = tree(a, bounds, levels, 0, 1 << (BITS - 1))
    else:
        found = tl.load(levels + _index(a, bounds, BITS))
    return tl.where(x > 0, found, -found)


@triton.jit
def _columns(x, M: tl.constexpr):
    """x [M, 16] -> its 16 columns [M]."""
    parts = (tl.reshape(x, (M, 2, 2, 2, 2)),)
    for _ in tl.static_range(4):
        even = ()
        odd = ()
        for k in tl.static_range(len(parts)):
            a, b = tl.split(parts[k])
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    return parts


@triton.jit
def _from_columns(parts, M: tl.constexpr):
    """16 columns [M] -> [M, 16]; the inverse of `_columns`."""
    for i in tl.static_range(4):
        joined = ()
        for k in tl.static_range(8 >> i):
            joined = joined + (tl.join(parts[k], parts[k + (8 >> i)]),)
        parts = joined
    return tl.reshape(parts[0], (M, 16))


@triton.jit
def _shape_slice(standard, sums, weights, bounds, levels, error_steps, back, M: tl.constexpr, D: tl.constexpr,
                 BITS: tl.constexpr):  # fmt: skip
    """The levels and errors (integers) of one slice, float32 [M, 16] each.

    sums: corrections from later slices, integers; weights: pointer to the slice's 16 x 16 block on the diagonal.
    """
    own, corrections = _columns(standard, M), _columns(sums, M)
    chosen, errors = (), ()
    for n in tl.static_range(16):
        total = corrections[15 - n]
        for m in tl.static_range(n):
            total += _as_float(tl.load(weights + (15 - n) * D + (16 - n + m))) * errors[m]
        target = own[15 - n] - total * back
        level = _level(target, bounds, levels, BITS)
        error = tl.minimum(tl.maximum((level - own[15 - n]) * error_steps, -_LARGEST), _LARGEST)
        chosen = (level,) + chosen
        errors = ((error + _MAGIC) - _MAGIC,) + errors
    return _from_columns(chosen, M), _from_columns(errors, M)


@triton.jit
def shaped_levels(standard, weights, bounds, levels, error_steps, D: tl.constexpr, DP: tl.constexpr,
                  BITS: tl.constexpr):  # fmt: skip
    """Coordinates float32 [M, DP] -> the levels that query-aware rounding chooses, float32 [M, DP].

    weights: pointer to the head's matrix, int8 [D, D]; levels: pointer to the levels by code, float32 [2 ** BITS].
    """
    M: tl.constexpr = standard.shape[0]
    S: tl.constexpr = DP // 16
    back = tl.div_rn(error_steps * 0.0 + 1.0, error_steps * _WEIGHT_STEPS)  # a power of two, exactly
    col = tl.arange(0, DP)
    number = tl.arange(0, S)[None, :, None]
    by_slice = tl.reshape(standard, (M, S, 16))
    chosen = by_slice
    errors = tl.zeros((M, S, 16), tl.float16)
    for n in range(D // 16):
        at = D // 16 - 1 - n
        row = at * 16 + tl.arange(0, 16)
        piece = tl.load(weights + row[None, :] * D + col[:, None], mask=(col < D)[:, None], other=0)
        sums = tl.dot(tl.reshape(errors, (M, DP)), _as_float(piece).to(tl.float16))  # errors are 0 until rounding
        own = tl.sum(tl.where(number == at, by_slice, 0.0), 1)
        found, error = _shape_slice(
            own, sums, weights + at * 16 * (D + 1), bounds, levels + (1 << (BITS - 1)), error_steps, back, M, D, BITS
        )  # fmt: skip
        chosen = tl.where(number == at, found[:, None, :], chosen)
        errors = tl.where(number == at, error.to(tl.float16)[:, None, :], errors)
    return tl.reshape(chosen, (M, DP))


@triton.jit
def indexed_levels(standard, weights, which, matrix_stride, row_mask, bounds, levels, error_steps, D: tl.constexpr,
                   DP: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """`shaped_levels` with the matrix ``which`` int32 [M] of each row; matrices are matrix_stride apart.

    Rows outside row_mask are arbitrary. Tokens of a program are neighbours in a chunk and nearly always share a matrix.
    """
    first = tl.min(tl.where(row_mask, which, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(row_mask, which, -1), 0)
    chosen = standard
    for number in range(first, last + 1):
        mine = row_mask & (which == number)
        if tl.max(mine.to(tl.int32), 0) > 0:
            own = weights + number * matrix_stride
            found = shaped_levels(standard, own, bounds, levels, error_steps, D, DP, BITS)
            chosen = tl.where(mine[:, None], found, chosen)
    return chosen
