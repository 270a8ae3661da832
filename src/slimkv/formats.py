"""Formats: how the values of K or V become codes, and how formats are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from slimkv.arguments import typed_fields
from slimkv.errors import SpecError

# The widths of the planes of a width (``slimkv.spec``), low bits first.
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,), 16: (16,), 32: (32,)}
RAW_DTYPES = {"bfloat16": 16, "float16": 16, "float32": 32}
_RAW_NAMES = {"bfloat16": "rawbf16", "float16": "rawfp16", "float32": "rawfp32"}


class Kind(StrEnum):
    """How the values of one vector become codes."""

    LLOYD = "lloyd"  # rotated, one scale, Lloyd-Max levels
    UNIFORM = "uniform"  # scale and zero, evenly spaced levels
    FP8 = "fp8"  # e4m3 with one power-of-two scale
    RAW = "raw"  # the input's own bits


class ScalePolicy(StrEnum):
    """The scale that multiplies the levels l of a ``lloyd`` vector x."""

    PLAIN = "plain"  # |x| / sqrt(dim): the standard deviation that Lloyd-Max assumes
    NORM = "norm"  # |x| / |l|: the reconstruction has the norm of x
    UNBIASED = "unbiased"  # |x|^2 / <x, l>: <x, x_hat> = |x|^2


def parse_policy(name: str) -> ScalePolicy:
    """``plain``, ``norm`` or ``unbiased``."""
    if not isinstance(name, str) or name not in list(ScalePolicy):
        raise SpecError(f"unknown scale policy {name!r}; known are {', '.join(ScalePolicy)}")
    return ScalePolicy(name)


@typed_fields(SpecError)
@dataclass(frozen=True)
class TensorFormat:
    """How K or V is stored: kind, width, and the parameters of the kind."""

    kind: Kind
    bits: int
    rotated: bool = False
    policy: ScalePolicy = ScalePolicy.NORM
    raw_dtype: str = "bfloat16"
    dtype_of_model: bool = False  # raw: ``with_raw_dtype`` may replace raw_dtype with the dtype of the model

    def __post_init__(self) -> None:
        allowed = {Kind.LLOYD: range(1, 9), Kind.UNIFORM: range(2, 9), Kind.FP8: (8,)}
        if self.kind == Kind.RAW:
            if self.raw_dtype not in RAW_DTYPES:
                raise SpecError(f"raw dtype {self.raw_dtype!r} is not one of {', '.join(RAW_DTYPES)}")
            if self.bits != RAW_DTYPES[self.raw_dtype]:
                raise SpecError(f"raw {self.raw_dtype} has {RAW_DTYPES[self.raw_dtype]} bits, not {self.bits}")
        elif self.bits not in allowed[self.kind]:
            widths = ", ".join(map(str, allowed[self.kind]))
            raise SpecError(f"{self.kind} does not support {self.bits} bits; supported are {widths}")
        if self.kind == Kind.LLOYD and not self.rotated:
            raise SpecError("lloyd is defined on rotated vectors only; use uniform for unrotated ones")
        if self.kind in (Kind.FP8, Kind.RAW) and self.rotated:
            raise SpecError(f"{self.kind} is stored unrotated")

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, low bits first; they sum to ``bits``."""
        return _PLANES[self.bits]

    @property
    def field_count(self) -> int:
        """16-bit numbers stored per vector beside its codes."""
        return {Kind.LLOYD: 1, Kind.UNIFORM: 2, Kind.FP8: 1, Kind.RAW: 0}[self.kind]

    @property
    def name(self) -> str:
        """The part of a format's name after ``k`` or ``v``."""
        if self.kind == Kind.LLOYD:
            return str(self.bits)
        if self.kind == Kind.UNIFORM:
            return f"u{'r' if self.rotated else ''}{self.bits}"
        if self.kind == Kind.FP8:
            return "fp8"
        return "raw" if self.dtype_of_model else _RAW_NAMES[self.raw_dtype]


def lloyd(bits: int) -> TensorFormat:
    """Rotated Lloyd-Max codes of 1-8 bits with one scale."""
    return TensorFormat(Kind.LLOYD, bits, rotated=True)


def uniform(bits: int, rotated: bool = False) -> TensorFormat:
    """Evenly spaced codes of 2-8 bits with a scale and a zero."""
    return TensorFormat(Kind.UNIFORM, bits, rotated=rotated)


def fp8() -> TensorFormat:
    """e4m3 codes with a power-of-two scale."""
    return TensorFormat(Kind.FP8, 8)


def raw(dtype: str | None = None) -> TensorFormat:
    """The input's own bits, lossless. Without ``dtype``: the dtype of the model, or bfloat16 if it is unknown."""
    if dtype is None:
        return TensorFormat(Kind.RAW, 16, dtype_of_model=True)
    return TensorFormat(Kind.RAW, RAW_DTYPES.get(dtype, 16), raw_dtype=dtype)


# vLLM's recipes, under vLLM's names only. Every name here is canonical: ``CodecSpec.format`` returns it unchanged.
_PRESETS: dict[str, tuple[TensorFormat, TensorFormat]] = {
    "turboquant_k8v4": (fp8(), uniform(4)),
    "turboquant_4bit_nc": (lloyd(4), uniform(4)),
    "turboquant_k3v4_nc": (lloyd(3), uniform(4)),
    "turboquant_3bit_nc": (lloyd(3), uniform(3)),
    "fp8": (fp8(), fp8()),
    "raw": (raw(), raw()),
}
PRESET_NAMES = {formats: name for name, formats in _PRESETS.items()}
_PART = r"(?:[1-8]|u[2-8]|ur[2-8]|fp8|raw|rawbf16|rawfp16|rawfp32)"
_PARTS = (
    "1-8 (Lloyd-Max), u2-u8 (uniform), ur2-ur8 (uniform, rotated), fp8, raw (the dtype of the model), rawbf16, "
    "rawfp16, rawfp32"
)
_PAIR = re.compile(rf"k({_PART})v({_PART})")
_LATENT = re.compile(rf"c({_PART})(?:r({_PART}))?")
_RAW_DTYPES_BY_NAME = {name: dtype for dtype, name in _RAW_NAMES.items()}


def known_formats() -> str:
    """The accepted format names, in one line for error messages and help texts."""
    return f"{', '.join(_PRESETS)}, or k<K>v<V> with K and V each one of {_PARTS}"


def parse_format(name: str) -> tuple[TensorFormat, TensorFormat]:
    """The formats of K and V that ``name`` stands for, such as ``k4v4`` or ``turboquant_4bit_nc``."""
    if not isinstance(name, str):
        raise SpecError(f"a format is a name such as 'k4v4', not {name!r}")
    known = name.strip().lower()
    if known in _PRESETS:
        return _PRESETS[known]
    if match := _PAIR.fullmatch(known):
        return _parse_part(match[1]), _parse_part(match[2])
    raise SpecError(f"unknown format {name!r}; known are {known_formats()}")


def _parse_part(part: str) -> TensorFormat:
    if part == "raw":
        return raw()
    if part in _RAW_DTYPES_BY_NAME:
        return raw(_RAW_DTYPES_BY_NAME[part])
    if part == "fp8":
        return fp8()
    if part.startswith("u"):
        return uniform(int(part[-1]), rotated=part.startswith("ur"))
    return lloyd(int(part[-1]))


DEFAULT_FORMAT = "k4v4"
# The default for latents: 4-bit codes, and the rope part in the dtype of the model.
DEFAULT_LATENT_FORMAT = "c4"
RAW, RAW_LATENT = "raw", "craw"  # unquantised, in the dtype of the model
# Names that resolve to other formats: the default for K and V or for latents, and the calibration's choice per layer.
AUTO, CALIBRATED = "auto", "calibrated"


def known_latent_formats() -> str:
    """The accepted names of latent formats, in one line for error messages and help texts."""
    latent = "c<L> or c<L>r<R> with L (the latent) and R (the rope part; raw without it) each one of"
    return f"{latent} {_PARTS}: c4, c4r8, c6r8, craw"


def is_latent_format(name: str) -> bool:
    """Whether ``name`` is a latent format (``c4r8``) and not a format of K and V (``k4v4``)."""
    return isinstance(name, str) and _LATENT.fullmatch(name.strip().lower()) is not None


def parse_latent_format(name: str) -> tuple[TensorFormat, TensorFormat]:
    """The formats of the latent and of the rope part that ``name`` stands for, such as ``c4`` or ``c4r8``."""
    if not isinstance(name, str):
        raise SpecError(f"a latent format is a name such as 'c4', not {name!r}")
    if match := _LATENT.fullmatch(name.strip().lower()):
        return _parse_part(match[1]), _parse_part(match[2] or "raw")
    raise SpecError(f"unknown latent format {name!r}; known are {known_latent_formats()}")


def format_of_kind(format: str, latent: bool) -> str:
    """``format`` resolved for layers that cache latents, or K and V; raises if it is a format of the other kind."""
    if format == AUTO:
        return DEFAULT_LATENT_FORMAT if latent else DEFAULT_FORMAT
    if not latent:
        if is_latent_format(format):
            raise SpecError(
                f"format {format!r} is for latents, but this model caches K and V: use {DEFAULT_FORMAT!r}, another "
                f"format of K and V, or {AUTO!r}"
            )
        return format
    if format == CALIBRATED:
        raise SpecError("slimkv does not calibrate latent attention: use a latent format, such as 'c4'")
    if format == RAW:
        return RAW_LATENT
    if not is_latent_format(format):
        raise SpecError(
            f"format {format!r} is for K and V, but this model caches latents: use {DEFAULT_LATENT_FORMAT!r}, "
            f"another latent format ({known_latent_formats()}), or {AUTO!r}"
        )
    return format
