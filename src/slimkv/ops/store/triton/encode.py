"""Triton functions that encode rows into codes and fields, byte for byte like the reference.

Only integers are summed, so the order does not matter. The rotation is a tensor-core product of a matrix of +-1 with
short integers (of 11 significant bits, like the 16-bit floats they come from) or with the upper and lower 11 bits of
longer ones. Everything else is single IEEE operations, compiled without contraction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec import quantize, scale16
from slimkv.codec.codebook import LEVEL_DENOMINATOR
from slimkv.ops.store.triton.query_aware import (
    crossing,
    crossing_of_product,
    indexed_levels,
    magnitude,
    shaped_levels,
)
from slimkv.ops.triton.rotate import hadamard_16, hadamard_rows
from slimkv.ops.triton.unpack import decode_signed, decode_unsigned

_MAGIC: tl.constexpr = tl.constexpr(quantize.ROUND_MAGIC)
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_FIXED: tl.constexpr = tl.constexpr(quantize.FIXED_POINT_BITS)
_SHORT: tl.constexpr = tl.constexpr(quantize.SHORT_FIXED_POINT_BITS)
_SHORT_DIM: tl.constexpr = tl.constexpr(quantize.LARGEST_SHORT_DIM)
_NORM_STEP: tl.constexpr = tl.constexpr(float(quantize.SHORT_NORM_STEP))
_LEAST: tl.constexpr = tl.constexpr(quantize.LEAST_EXPONENT)
_INVALID: tl.constexpr = tl.constexpr(scale16.INVALID)
_REBIAS: tl.constexpr = tl.constexpr(127 - scale16.BIAS)
_DENOMINATOR: tl.constexpr = tl.constexpr(LEVEL_DENOMINATOR)


@triton.jit
def _power_of_two(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _encode_unsigned(x):
    """float32 >= 0 -> the unsigned 16-bit field format, int32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (_REBIAS << 10)
    out = tl.where(rounded < 1024, 0, rounded)
    return tl.where((out >= _INVALID) | (bits >= 0x7F800000), _INVALID, out)


@triton.jit
def _encode_signed(x):
    """float32 -> the signed 16-bit field format, int32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = ((magnitude + 0x1FFF + ((magnitude >> 14) & 1)) >> 14) - (_REBIAS << 9)
    out = tl.where(rounded < 512, 0, rounded | tl.where(bits < 0, 0x8000, 0))
    return tl.where((rounded >= 0x7FFF) | (magnitude >= 0x7F800000), _INVALID, out)


@triton.jit
def _largest_exponent(x):
    """Per row: the bits of the largest magnitude, its exponent, whether it counts as zero, whether it is not finite."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(largest >> 23, 254)
    return largest, tl.maximum(exponent, _LEAST), exponent < _LEAST, largest >= 0x7F800000


@triton.jit
def _fixed_point(x, FIXED: tl.constexpr):
    """Rows of x as integers of at most 2^FIXED (float32 and int32), the inverse factor, zero rows, invalid rows.

    The products are exact, so a fused multiply-add rounds like the two operations of the reference. A float32 with the
    value 1.5 * 2^23 + n has the integer n in its low bits.
    """
    _, exponent, zero, bad = _largest_exponent(x)
    up = _power_of_two(-exponent + (253 + FIXED))
    down = _power_of_two(exponent - FIXED + 1)
    x = tl.where((zero | bad)[:, None], 0.0, x)
    shifted = tl.fma(x, tl.broadcast_to(up[:, None], x.shape), tl.full(x.shape, _MAGIC, tl.float32))
    return shifted - _MAGIC, shifted.to(tl.int32, bitcast=True) - _MAGIC_BITS, down, zero, bad


@triton.jit
def _halves(fixed):
    """Fixed-point integers as high * 2048 + low, both at most 1024 in magnitude: fp16 each."""
    magic = tl.full(fixed.shape, _MAGIC, tl.float32)
    high = tl.fma(fixed, tl.full(fixed.shape, 1.0 / 2048.0, tl.float32), magic) - _MAGIC
    low = tl.fma(high, tl.full(fixed.shape, -2048.0, tl.float32), fixed)
    return high.to(tl.float16), low.to(tl.float16)


@triton.jit
def _joined(high, low):
    """The sum of both `_halves`, rounded once."""
    return tl.fma(high, tl.full(high.shape, 2048.0, tl.float32), low)


@triton.jit
def _rotate_power_of_two(fixed, signs, D: tl.constexpr, SHORT: tl.constexpr):
    """The product with the signed Hadamard matrix, rounded once: float32 [M, D].

    The first column of the matrix contains the signs.
    """
    h = hadamard_16(signs, D)
    flip = tl.load(signs + tl.arange(0, D) * D).to(tl.float32)
    flipped = fixed * flip[None, :]
    if SHORT:
        return hadamard_rows(flipped.to(tl.float16), h)
    high, low = _halves(flipped)
    return _joined(hadamard_rows(high, h), hadamard_rows(low, h))


@triton.jit
def _rotate_fixed(fixed, down, skip, x_ptr, row_mask, signs, D: tl.constexpr, DP: tl.constexpr, SHORT: tl.constexpr):
    """The exact integer product with the Hadamard matrix, rounded once: float32 [M, DP]. SHORT: of short integers.

    For powers of two the matrix is factored (`_rotate_power_of_two`). For other sizes it is read in blocks of rows, and
    fixed-point numbers are recomputed for each block: x_ptr are pointers [M] to the rows, down their inverse factors,
    skip the rows that count as zero.
    """
    if D == DP and D >= 32:
        return _rotate_power_of_two(fixed, signs, D, SHORT)
    else:
        col = tl.arange(0, DP)
        up = _power_of_two(-(down.to(tl.int32, bitcast=True) >> 23) + 254)  # exactly 1 / down
        high_sum = tl.zeros(fixed.shape, tl.float32)
        low_sum = tl.zeros(fixed.shape, tl.float32)
        for k0 in range(0, D, 32):
            k = k0 + tl.arange(0, 32)
            mask = row_mask[:, None] & (k < D)[None, :]
            x = tl.load(x_ptr[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            x = tl.where(skip[:, None], 0.0, x * up[:, None])
            high, low = _halves((x + _MAGIC) - _MAGIC)
            inside = (k < D)[:, None] & (col < D)[None, :]
            h = tl.load(signs + k[:, None] * D + col[None, :], mask=inside, other=0.0).to(tl.float16)
            high_sum = tl.dot(high, h, high_sum)
            low_sum = tl.dot(low, h, low_sum)
        return _joined(high_sum, low_sum)


@triton.jit
def encode_lloyd(x, x_ptr, row_mask, signs, bounds, entries, unit, weights, which, matrix_stride, levels, error_steps,
                 D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, INDEXED: tl.constexpr):  # fmt: skip
    """Rows -> codes int32 [M, DP] and the scale's field int32 [M].

    x: in its own dtype; 16-bit floats become short integers. weights: the head's matrix of query-aware rounding, or
    None; INDEXED: there are several matrices, matrix_stride apart, and each row uses ``which`` [M].
    """
    col = tl.arange(0, DP)
    SHORT: tl.constexpr = BITS <= 4 and x.dtype.primitive_bitwidth == 16 and D <= _SHORT_DIM
    fixed, integers, down, zero, bad = _fixed_point(x.to(tl.float32), _SHORT if SHORT else _FIXED)
    rotated = _rotate_fixed(fixed, down, zero | bad, x_ptr, row_mask, signs, D, DP, SHORT)
    if SHORT:
        steps = (fixed / _NORM_STEP + _MAGIC) - _MAGIC
        squared = tl.sum(steps * steps, 1) * (_NORM_STEP * _NORM_STEP)  # at most 2^24 steps: exact in any order
    else:
        wide = integers.to(tl.int64)
        squared = tl.sum(wide * wide, 1).to(tl.float32)
    norm = tl.sqrt_rn(squared)
    factor = tl.div_rn(tl.zeros_like(norm) + unit, tl.where(zero | bad, 1.0, norm))
    standard = rotated * factor[:, None]
    if weights is not None:  # chosen levels replace the coordinates: a level rounds to itself
        if INDEXED:
            standard = indexed_levels(
                standard, weights, which, matrix_stride, row_mask, bounds, levels, error_steps, D, DP, BITS
            )
        else:
            standard = shaped_levels(standard, weights, bounds, levels, error_steps, D, DP, BITS)
    if SHORT and weights is None:
        across = crossing_of_product(rotated, tl.broadcast_to(factor[:, None], rotated.shape), standard)
    else:
        across = crossing(standard)
    index, entry = magnitude(across, bounds, entries, BITS)
    codes = index | ((standard > 0).to(tl.int32) << (BITS - 1))
    if DP != D:
        entry = tl.where(col[None, :] < D, entry, 0)
    if BITS <= 4:  # entries are squares of twice the level
        square_sum = tl.sum(entry, 1).to(tl.int64) * (_DENOMINATOR * _DENOMINATOR // 4)
    else:
        level = entry.to(tl.int64)
        square_sum = tl.sum(level * level, 1)
    length = tl.sqrt_rn(square_sum.to(tl.float32))
    scale = tl.div_rn(norm, tl.where(length > 0, length, 1.0)) * _DENOMINATOR
    field = _encode_unsigned(tl.where(zero, 0.0, scale * down))
    bad = bad | (field == _INVALID)
    codes = tl.where((bad | zero)[:, None], 0, codes)
    return codes, tl.where(bad, _INVALID, field)


@triton.jit
def encode_uniform(
    x, x_ptr, row_mask, signs, orthonormal, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr
):
    """Rows -> codes int32 [M, DP], step and zero fields int32 [M]."""
    col = tl.arange(0, DP)
    _, _, _, bad = _largest_exponent(x)
    x = tl.where(bad[:, None], 0.0, x)
    if ROTATED:
        fixed, _, down, zero_row, _ = _fixed_point(x, _FIXED)
        x = _rotate_fixed(fixed, down, zero_row, x_ptr, row_mask, signs, D, DP, False) * orthonormal * down[:, None]
    inside = (col < D)[None, :]
    low = tl.min(tl.where(inside, x, float("inf")), 1)
    high = tl.max(tl.where(inside, x, float("-inf")), 1)
    TOP: tl.constexpr = (1 << BITS) - 1
    step_field = _encode_unsigned(tl.div_rn(high - low, tl.zeros_like(low) + TOP))
    zero_field = _encode_signed(low)
    bad = bad | (step_field == _INVALID) | (zero_field == _INVALID)
    step = decode_unsigned(step_field)
    flat = (step == 0) | bad
    zero = tl.where(bad, 0.0, decode_signed(zero_field))
    divisor = tl.zeros_like(x) + tl.where(flat, 1.0, step)[:, None]
    place = tl.floor(tl.div_rn(x - zero[:, None], divisor) + 0.5)
    place = tl.minimum(tl.maximum(place, 0.0), TOP * 1.0)
    codes = tl.where(flat[:, None], 0, place.to(tl.int32))
    return codes, tl.where(bad, _INVALID, step_field), tl.where(bad, _INVALID, zero_field)


@triton.jit
def encode_fp8(x):
    """Rows -> e4m3 codes int32 [M, DP] and the scale's field int32 [M]; integer rounding, because sm_80 has no e4m3."""
    largest, exponent, zero, bad = _largest_exponent(x)
    shift = exponent - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    scaled = tl.where((zero | bad)[:, None], 0.0, x * _power_of_two(254 - shift)[:, None])
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    tiny = ((tl.abs(scaled) * 512.0 + _MAGIC) - _MAGIC).to(tl.int32)
    codes = tl.where(magnitude < (121 << 23), tiny, normal) | ((bits >> 24) & 0x80)
    field = tl.where(zero, 0, _encode_unsigned(_power_of_two(shift)))
    bad = bad | (field == _INVALID)
    return tl.where(bad[:, None], 0, codes), tl.where(bad, _INVALID, field)
