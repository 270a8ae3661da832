"""What the 16-bit number format of the scale costs: precision at each width, and the norms that survive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import Codec, scale16
from slimkv.spec import CodecSpec


def _ue6m10(scale: Tensor) -> Tensor:
    return scale16.decode_unsigned(scale16.encode_unsigned(scale))


SCALE_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda scale: scale,
    "float16": lambda scale: scale.half().float(),
    "bfloat16": lambda scale: scale.bfloat16().float(),
    "ue6m10": _ue6m10,
}


@dataclass(frozen=True)
class ScaleFormatResult:
    """One number format: the mean squared error at each width over that of an exact scale, and at extreme norms."""

    name: str
    widths: tuple[int, ...]
    over_exact: tuple[float, ...]  # at norm 1
    at_norm: dict[str, float | None]  # the same at 4 bits for vectors of these norms; None where a number overflowed


def _errors(x: Tensor, bits: int, rounding: Callable[[Tensor], Tensor]) -> float:
    """Mean squared error over squared norm, with the norm-corrected scale stored in a format."""
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", x.shape[-1]), x.device)
    levels = codec.key_tables.levels[codec.encode_key(x).codes.long()].double()
    scale = x.double().norm(dim=-1, keepdim=True) / levels.norm(dim=-1, keepdim=True)
    direction = levels @ codec.key_rotation.double().T
    error = (direction * rounding(scale.float()).double() - x).square().sum(-1) / x.double().square().sum(-1)
    return float(error.mean())


def compare_scale_formats(
    head_dim: int = 128, widths: Sequence[int] = (2, 4, 6, 7, 8), norms: Sequence[float] = (1e-6, 1e-4, 6.5e4, 1e8)
) -> list[ScaleFormatResult]:
    """Every candidate format on the same random directions."""
    for bits in widths:
        CodecSpec.parse(f"k{bits}v{bits}", head_dim)  # refuses what it cannot make
    x = torch.randn(4096, head_dim, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True) * torch.exp2(torch.rand(4096, 1, generator=torch.Generator().manual_seed(1)))
    exact = {bits: _errors(x, bits, SCALE_FORMATS["float32"]) for bits in {*widths, 4}}
    out = []
    for name, rounding in SCALE_FORMATS.items():
        ratios = tuple(_errors(x, bits, rounding) / exact[bits] for bits in widths)
        extreme = {f"{norm:g}": _errors(x * norm, 4, rounding) / exact[4] for norm in norms}
        finite = {norm: value if value < float("inf") else None for norm, value in extreme.items()}
        out.append(ScaleFormatResult(name, tuple(widths), ratios, finite))
    return out
