"""Vectors to codes and fields, and back. This plain torch code defines the arithmetic.

Encoding must give the same bytes on every device, in any order of summation. Therefore only integers are summed: a
vector is first converted to fixed point relative to its largest coordinate, a Hadamard matrix of +-1 maps integers to
integers, and squares are added in 64 bits. Everything else is single IEEE operations (multiply, divide, square root),
each rounded once and never fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import scale16
from slimkv.codec.codebook import LEVEL_DENOMINATOR
from slimkv.codec.query_aware import query_aware_index
from slimkv.errors import InputError
from slimkv.spec import Kind, ScalePolicy, TensorFormat

FIXED_POINT_BITS = 21
SHORT_FIXED_POINT_BITS = 16  # for 16-bit inputs: sums of such integers are exact in float32
SHORT_NORM_STEP = 256  # the norm is computed from multiples of this step, at most 256 steps each
LARGEST_SHORT_DIM = 256  # the sum of this many short integers stays within 2^24
ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even
LEAST_EXPONENT = 67  # biased float32 exponent below which a vector counts as zero (2^-60)
FP8_LARGEST = 448.0


@dataclass(frozen=True)
class Encoded:
    """Codes and 16-bit fields of vectors of any batch shape."""

    codes: Tensor  # uint8 [..., dim]; int32 holding the bits for raw
    fields: Tensor  # int32 [..., field_count], each in 0..0xFFFF


@dataclass(frozen=True)
class SideTables:
    """The constants of one side (K or V) of a codec, on one device."""

    hadamard: Tensor  # float64 [dim, dim] of +-1; rotated = x @ hadamard / sqrt(block)
    levels: Tensor  # float32 [2 ** bits] by code, in grid units (empty unless lloyd)
    boundaries: Tensor  # float32 [2 ** bits - 1], ascending
    unit: float  # grid units per unnormalised rotated coordinate of a vector of norm 1
    plain_scale: float  # float32: the plain policy's scale of a vector of norm 1
    orthonormal: float  # float32: 1 / sqrt(block), which makes the Hadamard matrix orthonormal
    signs: Tensor  # bfloat16 [dim, dim]: the same matrix, for kernels
    bounds: Tensor  # int32 [2 ** (bits - 1) - 1]: float32 bits of the positive boundaries, for kernels
    entries: Tensor  # int32 [2 ** (bits - 1)]: the look-up table of store kernels, by magnitude
    root_dim: float  # float32: <x, x_hat> / <rotated, levels>, for the unbiased policy
    error_steps: float  # a power of two: steps per grid unit in which query-aware rounding stores errors


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    return (biased_exponent << 23).view(torch.float32)


def becomes_short(fmt: TensorFormat, dtype: torch.dtype, dim: int) -> bool:
    """Whether vectors given in ``dtype`` become short integers.

    16-bit floats have 8 or 11 significant bits; for codes of up to 4 bits, 16 fixed-point bits lose nothing.
    """
    return fmt.kind == Kind.LLOYD and fmt.bits <= 4 and dtype.itemsize == 2 and dim <= LARGEST_SHORT_DIM


def _largest(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bits of each vector's largest magnitude, its biased exponent, and whether the vector counts as zero."""
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    exponent = largest >> 23
    return largest, exponent.clamp(LEAST_EXPONENT, 254), exponent < LEAST_EXPONENT


def _fixed_point(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as integers of at most 2^bits (in float32), the unit of each vector, and which vectors count as zero."""
    _, exponent, zero = _largest(x)
    up = _power_of_two(127 + bits + 126 - exponent)
    down = _power_of_two(exponent - bits + 1)
    fixed = (x * up + ROUND_MAGIC) - ROUND_MAGIC
    return torch.where(zero, 0.0, fixed), down, zero


def rotate_fixed(fixed: Tensor, tables: SideTables) -> Tensor:
    """Integers (float32) -> unnormalised rotated coordinates: the exact integer sum, rounded once to float32."""
    return (fixed.double() @ tables.hadamard).float()


def squared_norm(fixed: Tensor) -> Tensor:
    """Integers (float32) [..., dim] -> the exact sum of their squares, rounded once to float32 [..., 1]."""
    return fixed.to(torch.int64).square().sum(-1, keepdim=True).float()


def squared_norm_in_steps(fixed: Tensor) -> Tensor:
    """``squared_norm`` of short integers, each first rounded to the nearest multiple of the step, ties to even."""
    steps = (fixed / SHORT_NORM_STEP + ROUND_MAGIC) - ROUND_MAGIC
    return squared_norm(steps) * SHORT_NORM_STEP**2


def encode_lloyd(
    x: Tensor, fmt: TensorFormat, tables: SideTables, query_aware: Tensor | None = None, short: bool = False
) -> Encoded:
    """float32 [..., dim] (finite) -> Lloyd-Max codes and one scale.

    ``query_aware`` as in ``slimkv.codec.query_aware``; ``short`` from ``becomes_short``.
    """
    fixed, down, zero = _fixed_point(x, SHORT_FIXED_POINT_BITS if short else FIXED_POINT_BITS)
    rotated = rotate_fixed(fixed, tables)
    squared = squared_norm_in_steps(fixed) if short else squared_norm(fixed)
    norm = squared.sqrt()
    safe_norm = torch.where(zero, 1.0, norm)
    factor = torch.tensor(tables.unit, dtype=torch.float32, device=x.device) / safe_norm
    half = 1 << (fmt.bits - 1)
    if query_aware is not None:
        ascending = torch.cat([tables.levels[:half].flip(0), tables.levels[half:]])
        index = query_aware_index(rotated * factor, ascending, tables.boundaries, query_aware, tables.error_steps)
    elif short:  # the exact product is compared: it has 48 bits, which float64 represents
        index = torch.bucketize(rotated.double() * factor.double(), tables.boundaries.double())
    else:
        index = torch.bucketize(rotated * factor, tables.boundaries)  # a value on a boundary takes the lower level
    codes = torch.where(index >= half, index, half - 1 - index).to(torch.uint8)
    scale = _lloyd_scale(rotated, codes, squared, norm, fmt, tables) * down
    field = scale16.encode_unsigned(torch.where(zero, 0.0, scale))
    return Encoded(torch.where(zero, 0, codes).to(torch.uint8), field)


def _lloyd_scale(
    rotated: Tensor, codes: Tensor, squared: Tensor, norm: Tensor, fmt: TensorFormat, tables: SideTables
) -> Tensor:
    """The policy's scale in fixed-point units: float32 [..., 1]."""
    if fmt.policy == ScalePolicy.PLAIN:
        return norm * tables.plain_scale
    levels = (tables.levels * LEVEL_DENOMINATOR).to(torch.int64)[codes.long()]
    if fmt.policy == ScalePolicy.NORM:
        length = levels.square().sum(-1, keepdim=True).float().sqrt()
        return norm / length * LEVEL_DENOMINATOR
    dot = (rotated.to(torch.int64) * levels).sum(-1, keepdim=True).float()
    return squared * tables.root_dim / dot * LEVEL_DENOMINATOR


def decode_lloyd(encoded: Encoded, tables: SideTables) -> Tensor:
    """-> float32 [..., dim] in rotated space."""
    return tables.levels[encoded.codes.long()] * scale16.decode_unsigned(encoded.fields[..., :1])


def encode_uniform(x: Tensor, fmt: TensorFormat, tables: SideTables) -> Encoded:
    """float32 [..., dim] (finite) -> evenly spaced codes between the smallest and the largest coordinate."""
    if fmt.rotated:
        fixed, down, _ = _fixed_point(x, FIXED_POINT_BITS)
        x = rotate_fixed(fixed, tables) * tables.orthonormal * down
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    top = (1 << fmt.bits) - 1
    step_field = scale16.encode_unsigned((high - low) / torch.tensor(float(top), device=x.device))
    zero_field = scale16.encode_signed(low)
    step, zero = scale16.decode_unsigned(step_field), scale16.decode_signed(zero_field)
    flat = step == 0
    position = torch.floor((x - zero) / torch.where(flat, 1.0, step) + 0.5).clamp(0, top)
    codes = torch.where(flat, 0.0, torch.nan_to_num(position)).to(torch.uint8)
    return Encoded(codes, torch.cat([step_field, zero_field], -1))


def decode_uniform(encoded: Encoded) -> Tensor:
    """-> float32 [..., dim] in the space in which the vectors were encoded."""
    step = scale16.decode_unsigned(encoded.fields[..., :1])
    zero = scale16.decode_signed(encoded.fields[..., 1:])
    return encoded.codes.float() * step + zero


def encode_fp8(x: Tensor) -> Encoded:
    """float32 [..., dim] (finite) -> e4m3 codes, scaled by a power of two so that the largest is in (224, 448]."""
    largest, exponent, zero = _largest(x)
    over = ((largest & 0x7FFFFF) > 0x600000).to(torch.int32)  # mantissa beyond 1.75, which is 448 / 256
    down = _power_of_two(exponent - 8 + over)
    up = _power_of_two(254 - (exponent - 8 + over))
    scaled = torch.where(zero, 0.0, x * up)
    codes = scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    field = scale16.encode_unsigned(torch.where(zero, 0.0, down))
    return Encoded(codes, field)


def decode_fp8(encoded: Encoded) -> Tensor:
    """-> float32 [..., dim]."""
    numbers = encoded.codes.contiguous().view(torch.float8_e4m3fn).float()
    return numbers * scale16.decode_unsigned(encoded.fields[..., :1])


def encode_raw(x: Tensor, fmt: TensorFormat) -> Encoded:
    """A tensor of the raw dtype -> its bits."""
    dtype = getattr(torch, fmt.raw_dtype)
    if x.dtype != dtype:
        raise InputError(
            f"the raw format stores {fmt.raw_dtype} bit for bit, but the input is {x.dtype}; "
            "convert it, or use the raw format of its dtype (rawbf16, rawfp16, rawfp32)"
        )
    x = x.contiguous()
    bits = x.view(torch.int32) if fmt.bits == 32 else x.view(torch.int16).to(torch.int32) & 0xFFFF
    return Encoded(bits, bits.new_empty(*x.shape[:-1], 0))


def decode_raw(encoded: Encoded, fmt: TensorFormat) -> Tensor:
    """-> the raw dtype [..., dim], bit for bit."""
    dtype = getattr(torch, fmt.raw_dtype)
    if fmt.bits == 32:
        return encoded.codes.to(torch.int32).contiguous().view(dtype)
    signed = torch.where(encoded.codes >= 1 << 15, encoded.codes - (1 << 16), encoded.codes)
    return signed.to(torch.int16).view(dtype)


def invalid_vectors(x: Tensor, encoded: Encoded) -> Tensor:
    """bool [...]: vectors with a NaN or Inf, or whose scale or zero lies outside the 16-bit fields' range."""
    return ~torch.isfinite(x).all(-1) | (encoded.fields == scale16.INVALID).any(-1)


def mark_invalid(encoded: Encoded, bad: Tensor) -> Encoded:
    """Marks vectors that cannot be encoded: all codes 0 and all fields INVALID, so that they decode to NaN."""
    return Encoded(
        torch.where(bad[..., None], 0, encoded.codes).to(encoded.codes.dtype),
        torch.where(bad[..., None], scale16.INVALID, encoded.fields).to(torch.int32),
    )
