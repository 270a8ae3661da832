"""The two 16-bit number formats that pages store beside the codes.

* ``unsigned``: 6 exponent and 10 mantissa bits, no sign, bias 40: 1.8e-12 to 1.7e7 at fp16's precision. For scales.
* ``signed``: sign, 6 exponent and 9 mantissa bits, same bias. For zeros of the uniform format.

fp16 loses small scales (a key of norm 1e-6) and large ones (above 65504); bf16 keeps them, but its 8-bit
precision adds 7% to the squared error of 8-bit codes. Six exponent bits cover this range and decode with a shift and a
multiplication. 0 means zero. 0xFFFF marks a vector that could not be encoded (NaN, Inf, overflow) and decodes to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 40
INVALID = 0xFFFF
SMALLEST_NORMAL = float(2.0 ** (1 - BIAS))
_REBIAS = 127 - BIAS
_RESCALE = 2.0**_REBIAS


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def encode_unsigned(x: Tensor) -> Tensor:
    """float32 >= 0 -> int32 in 0..0xFFFF: nearest, ties to even; tiny values become 0, NaN and overflow INVALID."""
    bits = _bits(x)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (_REBIAS << 10)
    out = torch.where(rounded < 1 << 10, 0, rounded)
    return torch.where((out >= INVALID) | ~torch.isfinite(x), INVALID, out).to(torch.int32)


def decode_unsigned(code: Tensor) -> Tensor:
    """int32 in 0..0xFFFF -> float32."""
    value = (code << 13).view(torch.float32) * _RESCALE
    return torch.where(code == INVALID, torch.nan, value)


def encode_signed(x: Tensor) -> Tensor:
    """float32 -> int32 in 0..0xFFFF: nearest, ties to even; tiny values become 0, NaN and overflow INVALID."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    rounded = ((magnitude + 0x1FFF + ((magnitude >> 14) & 1)) >> 14) - (_REBIAS << 9)
    sign = torch.where(bits < 0, 0x8000, 0)
    out = torch.where(rounded < 1 << 9, 0, rounded | sign)
    return torch.where((rounded >= 0x7FFF) | ~torch.isfinite(x), INVALID, out).to(torch.int32)


def decode_signed(code: Tensor) -> Tensor:
    """int32 in 0..0xFFFF -> float32."""
    magnitude = ((code & 0x7FFF) << 14).view(torch.float32) * _RESCALE
    value = torch.where(code >= 0x8000, -magnitude, magnitude)
    return torch.where(code == INVALID, torch.nan, value)
