"""Triton pieces that choose levels: the nearest, or with query-aware rounding, byte for byte as the reference does.

Rounding goes from the last coordinate to the first, in slices of 16. Errors of later slices correct a whole slice by a
product on the tensor cores; within a slice each row of 16 coordinates is taken apart into 16 columns, so that the
sequential part is plain arithmetic on registers. All sums are of integers below 2^24: exact in any order.
"""

# mypy: disable-error-code="assignment"
# Tuples of tensors grow here while Triton unrolls a loop.

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec.quantize import ROUND_MAGIC
from slimkv.codec.rounding import LARGEST_BYTE, WEIGHT_STEPS

_MAGIC: tl.constexpr = tl.constexpr(ROUND_MAGIC)
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)  # of _MAGIC; adding n to the bits adds n to the number
_LARGEST: tl.constexpr = tl.constexpr(float(LARGEST_BYTE))
_WEIGHT_STEPS: tl.constexpr = tl.constexpr(WEIGHT_STEPS)


@triton.jit
def _loaded(bounds, COUNT: tl.constexpr):
    """The COUNT boundaries at a pointer."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(bounds + i),)
    return found


@triton.jit
def tree(a, bounds, entries, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """entries[FIRST + i], i = how many of the COUNT - 1 boundaries from FIRST on lie below a: a tree of comparisons."""
    if COUNT == 1:
        return tl.zeros_like(a) + tl.load(entries + FIRST)
    elif COUNT == 2:
        return tl.where(a > bounds[FIRST], tl.load(entries + FIRST + 1), tl.load(entries + FIRST))
    else:
        # The middle boundary chooses the half; within it the boundaries and entries are chosen, not the results.
        HALF: tl.constexpr = COUNT // 2
        upper = a > bounds[FIRST + HALF - 1]
        if COUNT == 4:
            bound = tl.where(upper, bounds[FIRST + 2], bounds[FIRST])
            second = a > bound
            low = tl.where(second, tl.load(entries + FIRST + 1), tl.load(entries + FIRST))
            high = tl.where(second, tl.load(entries + FIRST + 3), tl.load(entries + FIRST + 2))
            return tl.where(upper, high, low)
        else:
            return tl.where(upper, tree(a, bounds, entries, FIRST + HALF, HALF), tree(a, bounds, entries, FIRST, HALF))


@triton.jit
def _crossing(x):
    """|x| as an integer that is larger than a boundary's bits where x crosses it: int32.

    A negative value counts as the next larger float, which makes it cross a boundary that it lies on.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFFFF) + ((bits >> 31) & 1)


@triton.jit
def sum_bounds(factor, bounds, BITS: tl.constexpr):
    """The boundaries of integers whose products with ``factor`` [M], as they are, are compared: a tuple of int32 [M, 1].

    An integer crosses b if it exceeds b / factor. Where that is no integer, anything between its two neighbours will do.
    """
    bits = factor.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    found = ()
    for i in tl.static_range((1 << (BITS - 1)) - 1):
        bound = tl.load(bounds + i)
        shift = tl.maximum((bound >> 23) - (bits >> 23), 0).to(tl.int64)  # below 0 only where a vector is zero
        scaled = ((bound & 0x7FFFFF) | 0x800000).to(tl.int64) << shift
        quotient = tl.div_rn(tl.zeros_like(factor) + bound.to(tl.float32, bitcast=True), factor)  # below 2^22
        whole = tl.floor(quotient)  # or one more than it should be, if the quotient was rounded up to an integer
        over = whole.to(tl.int64) * mantissa - scaled
        between = tl.where(over > 0, whole - 0.5, tl.where(over == 0, whole, whole + 0.5))
        found = found + (between.to(tl.int32, bitcast=True)[:, None],)
    return found


@triton.jit
def magnitude_of_sum(x, sum_bounds, entries, BITS: tl.constexpr):
    """`magnitude` of integers, up to 4 bits, with boundaries from `sum_bounds`."""
    both = tree(_crossing(x), sum_bounds, entries, 0, 1 << (BITS - 1))
    return both >> 16, both & 0xFFFF


@triton.jit
def magnitude(x, bounds, entries, BITS: tl.constexpr):
    """Which level |x| rounds to and its entry: int32 each; a value on a boundary takes the lower level.

    Up to 4 bits an entry carries the index above its low 16 bits.
    """
    a = _crossing(x)
    if BITS <= 4:
        both = tree(a, _loaded(bounds, (1 << (BITS - 1)) - 1), entries, 0, 1 << (BITS - 1))
        return both >> 16, both & 0xFFFF
    else:
        index = tl.zeros_like(a)
        for i in tl.static_range(BITS - 1):
            index += tl.where(a > tl.load(bounds + index + ((1 << (BITS - 2 - i)) - 1)), 1 << (BITS - 2 - i), 0)
        return index, tl.load(entries + index)


@triton.jit
def _as_float(byte):
    """int8 -> float32: an addition instead of a conversion, which a GPU does at an eighth of the speed."""
    return (byte.to(tl.int32) + _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def _level(x, bounds, levels, BITS: tl.constexpr):
    """The level that x rounds to: float32; levels: pointer to the positive ones."""
    a = _crossing(x)
    if BITS <= 4:
        found = tree(a, _loaded(bounds, (1 << (BITS - 1)) - 1), levels, 0, 1 << (BITS - 1))
    else:
        index = tl.zeros_like(a)
        for i in tl.static_range(BITS - 1):
            index += tl.where(a > tl.load(bounds + index + ((1 << (BITS - 2 - i)) - 1)), 1 << (BITS - 2 - i), 0)
        found = tl.load(levels + index)
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

    sums: its corrections by later slices, integers; weights: pointer to the slice's own 16 x 16 piece of the matrix.
    """
    own, corrections = _columns(standard, M), _columns(sums, M)
    chosen, errors = (), ()
    for n in tl.static_range(16):
        total = corrections[15 - n]
        for m in tl.static_range(n):
            total += _as_float(tl.load(weights + (15 - n) * D + (16 - n + m))) * errors[m]
        level = _level(own[15 - n] - total * back, bounds, levels, BITS)
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
        sums = tl.dot(tl.reshape(errors, (M, DP)), _as_float(piece).to(tl.float16))  # errors not yet made are zero
        own = tl.sum(tl.where(number == at, by_slice, 0.0), 1)
        found, error = _shape_slice(
            own, sums, weights + at * 16 * (D + 1), bounds, levels + (1 << (BITS - 1)), error_steps, back, M, D, BITS
        )
        chosen = tl.where(number == at, found[:, None, :], chosen)
        errors = tl.where(number == at, error.to(tl.float16)[:, None, :], errors)
    return tl.reshape(chosen, (M, DP))
