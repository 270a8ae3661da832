"""Formats and sizes: what is stored for one K or V vector, and where each byte of a page sits.

Every byte count and offset in the project is a property of the frozen dataclasses in this file.

A *region* is one block of tokens of one KV head. Inside a region:

    key codes | value codes | 16-bit fields (key scale [, key zero], value scale [, value zero])

Codes are laid out in tiles of 16 tokens, in the register order of the tensor-core instruction
``mma.m16n8k16``, so that a lane of a warp finds the values it must hold in whole 32-bit words:

* a *slice* is 16 dimensions; lane ``4 g + t`` (g < 8, t < 4) owns 8 values of every 16 x 16 slice;
* keys:   tokens g and g + 8, dimensions 2t, 2t+1, 2t+8, 2t+9;
* values: dimensions g and g + 8, tokens 2t, 2t+1, 2t+8, 2t+9;
* the 8 values are numbered so that a token owns whole bytes: appending a token is plain byte stores.

A width is stored as *planes* of 1, 2, 4, 8, 16 or 32 bits (3 = 2 + 1, 5 = 4 + 1, ...), low bits first.
In a plane of w <= 4 bits one word holds 4 / w slices: value n of the j-th of them sits at bit
``4 n + w j``, so one shift and one mask align any plane to nibbles. Slices that do not fill a word
(odd head sizes in 1- and 2-bit planes) follow as plain token rows. No byte is padded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property

import numpy as np

from slimkv.errors import SpecError

LAYOUT_VERSION = 1
TILE_TOKENS = 16
SLICE_DIMS = 16
LANES = 32
FIELD_BYTES = 2
REGION_ALIGNMENT = 16
BLOCK_SIZES = (1, 16, 32, 64, 128)
MAX_HEAD_DIM = 1024
DEFAULT_SEED = 0x51
BF16_BYTES = 2

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,), 16: (16,), 32: (32,)}
RAW_DTYPES = {"bfloat16": 16, "float16": 16, "float32": 32}


class Kind(StrEnum):
    """How the numbers of one vector become codes."""

    LLOYD = "lloyd"  # rotated, one scale, Lloyd-Max levels
    UNIFORM = "uniform"  # scale and zero, evenly spaced levels
    FP8 = "fp8"  # e4m3 with one power-of-two scale
    RAW = "raw"  # the input's own bits


class ScalePolicy(StrEnum):
    """Which scalar multiplies the levels of a ``lloyd`` vector x with reconstruction direction l."""

    PLAIN = "plain"  # |x| over the norm that levels have on average: what Lloyd-Max assumes
    NORM = "norm"  # |x| / |l|: the reconstruction has the norm of x
    UNBIASED = "unbiased"  # |x|^2 / <x, l>: <x, x_hat> = |x|^2


def parse_policy(word: str) -> ScalePolicy:
    """``plain``, ``norm`` or ``unbiased``."""
    if word not in list(ScalePolicy):
        raise SpecError(f"unknown scale policy {word!r}; known are {', '.join(ScalePolicy)}")
    return ScalePolicy(word)


@dataclass(frozen=True)
class TensorFormat:
    """How K or V is stored: kind, width, and what belongs to the kind."""

    kind: Kind
    bits: int
    rotated: bool = False
    policy: ScalePolicy = ScalePolicy.NORM
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        allowed = {Kind.LLOYD: range(1, 9), Kind.UNIFORM: range(2, 9), Kind.FP8: (8,)}
        if self.kind == Kind.RAW:
            if self.raw_dtype not in RAW_DTYPES:
                raise SpecError(f"raw dtype {self.raw_dtype!r} is not one of {', '.join(RAW_DTYPES)}")
            if self.bits != RAW_DTYPES[self.raw_dtype]:
                raise SpecError(f"raw {self.raw_dtype} has {RAW_DTYPES[self.raw_dtype]} bits, not {self.bits}")
        elif self.bits not in allowed[self.kind]:
            widths = ", ".join(map(str, allowed[self.kind]))
            raise SpecError(f"{self.kind} does not come in {self.bits} bits; it comes in {widths}")
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
    def word(self) -> str:
        """The format as ``CodecSpec.parse`` reads it after ``k`` or ``v``."""
        if self.kind == Kind.LLOYD:
            return f"l{self.bits}"
        if self.kind == Kind.UNIFORM:
            return f"u{'r' if self.rotated else ''}{self.bits}"
        if self.kind == Kind.FP8:
            return "fp8"
        return {"bfloat16": "rawbf16", "float16": "rawfp16", "float32": "rawfp32"}[self.raw_dtype]


def lloyd(bits: int, policy: ScalePolicy = ScalePolicy.NORM) -> TensorFormat:
    """Rotated Lloyd-Max codes of 1-8 bits with one scale."""
    return TensorFormat(Kind.LLOYD, bits, rotated=True, policy=policy)


def uniform(bits: int, rotated: bool = False) -> TensorFormat:
    """Evenly spaced codes of 2-8 bits with a scale and a zero."""
    return TensorFormat(Kind.UNIFORM, bits, rotated=rotated)


def fp8() -> TensorFormat:
    """e4m3 codes with a power-of-two scale."""
    return TensorFormat(Kind.FP8, 8)


def raw(dtype: str = "bfloat16") -> TensorFormat:
    """The input's own bits, lossless."""
    return TensorFormat(Kind.RAW, RAW_DTYPES.get(dtype, 16), raw_dtype=dtype)


_PRESETS: dict[str, tuple[TensorFormat, TensorFormat]] = {
    "tq2": (lloyd(2), lloyd(2)),
    "tq3": (lloyd(3), lloyd(3)),
    "tq4": (lloyd(4), lloyd(4)),
    "k8v4": (fp8(), uniform(4)),
    "4bit_nc": (lloyd(4), uniform(4)),
    "k3v4_nc": (lloyd(3), uniform(4)),
    "3bit_nc": (lloyd(3), uniform(3)),
    "fp8": (fp8(), fp8()),
    "raw": (raw(), raw()),
}
_PART = r"(?:l?[1-8]|u[2-8]|ur[2-8]|fp8|rawbf16|rawfp16|rawfp32|raw)"
_PAIR = re.compile(rf"k({_PART})v({_PART})")
_RAW_WORDS = {"raw": "bfloat16", "rawbf16": "bfloat16", "rawfp16": "float16", "rawfp32": "float32"}


def known_words() -> str:
    """The accepted format words, in one line for error messages and help texts."""
    presets = ", ".join(_PRESETS)
    return (
        f"{presets}, or k<K>v<V> with K and V each one of 1-8 (Lloyd-Max; l1-l8 says so explicitly), "
        "u2-u8 (uniform), ur2-ur8 (uniform, rotated), fp8, raw, rawbf16, rawfp16, rawfp32"
    )


def _parse_part(part: str) -> TensorFormat:
    if part in _RAW_WORDS:
        return raw(_RAW_WORDS[part])
    if part == "fp8":
        return fp8()
    if part.startswith("u"):
        return uniform(int(part[-1]), rotated=part.startswith("ur"))
    return lloyd(int(part[-1]))


@dataclass(frozen=True)
class CodecSpec:
    """The formats of K and V and the head sizes they are used with."""

    key: TensorFormat
    value: TensorFormat
    key_dim: int
    value_dim: int
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        for name, dim in (("key", self.key_dim), ("value", self.value_dim)):
            if dim % SLICE_DIMS or not SLICE_DIMS <= dim <= MAX_HEAD_DIM:
                raise SpecError(
                    f"{name} head_dim {dim} is not supported: slimkv takes multiples of {SLICE_DIMS} "
                    f"from {SLICE_DIMS} to {MAX_HEAD_DIM}"
                )
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"seed {self.seed} is not in 0 .. 2**63 - 1")

    @classmethod
    def parse(
        cls,
        word: str,
        head_dim: int,
        value_dim: int | None = None,
        *,
        key_policy: ScalePolicy | None = None,
        value_policy: ScalePolicy | None = None,
        seed: int = DEFAULT_SEED,
    ) -> CodecSpec:
        """Reads a word such as ``k4v4``, ``tq4``, ``4bit_nc`` or ``kfp8vu4``.

        vLLM's preset names keep vLLM's recipe: ``k8v4`` is fp8 keys with uniform 4-bit values; Lloyd-Max keys of
        8 bits with 4-bit Lloyd-Max values are written ``kl8v4``. A policy applies to ``lloyd`` sides only.
        """
        name = word.strip().lower().removeprefix("turboquant_")
        if name in _PRESETS:
            key, value = _PRESETS[name]
        elif match := _PAIR.fullmatch(name):
            key, value = _parse_part(match[1]), _parse_part(match[2])
        else:
            raise SpecError(f"unknown format {word!r}; known are {known_words()}")
        if key_policy is not None and key.kind == Kind.LLOYD:
            key = replace(key, policy=parse_policy(key_policy))
        if value_policy is not None and value.kind == Kind.LLOYD:
            value = replace(value, policy=parse_policy(value_policy))
        return cls(key, value, head_dim, head_dim if value_dim is None else value_dim, seed)

    @property
    def word(self) -> str:
        """A word that ``parse`` turns back into these formats."""
        return f"k{self.key.word}v{self.value.word}"

    def with_raw_dtype(self, dtype: str) -> CodecSpec:
        """The same spec with every ``raw`` side holding ``dtype`` (what the model computes in)."""
        key, value = (raw(dtype) if side.kind == Kind.RAW else side for side in (self.key, self.value))
        return replace(self, key=key, value=value)

    @property
    def bits_per_number(self) -> float:
        """Stored bits over stored numbers, scales included, before any region alignment."""
        fields = 8 * FIELD_BYTES * (self.key.field_count + self.value.field_count)
        codes = self.key.bits * self.key_dim + self.value.bits * self.value_dim
        return (codes + fields) / (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class PlaneLayout:
    """One bit plane of the codes of a tile (or of a token row)."""

    bits: int
    low_bit: int  # the code's bit that is this plane's lowest
    offset: int  # bytes from the start of the tile's codes of this side
    words: int  # 32-bit words per lane in fragment order
    tail_slices: int  # slices stored as token rows behind them

    @property
    def tail_offset(self) -> int:
        """Bytes from the plane's start to its token rows."""
        return 4 * LANES * self.words

    @property
    def tail_row_bytes(self) -> int:
        """Bytes one token has in those rows."""
        return self.tail_slices * SLICE_DIMS * self.bits // 8


@dataclass(frozen=True)
class SideLayout:
    """Where the codes and fields of K (or V) sit inside a region."""

    format: TensorFormat
    dim: int
    block_tokens: int
    codes_offset: int
    fields_offset: int
    transposed: bool  # values: the fragment's rows are dimensions

    @property
    def tile_tokens(self) -> int:
        """Tokens whose codes are laid out together (1 for plain token rows)."""
        return min(self.block_tokens, TILE_TOKENS)

    @property
    def tile_bytes(self) -> int:
        """Code bytes of one tile."""
        return self.tile_tokens * self.dim * self.format.bits // 8

    @property
    def codes_bytes(self) -> int:
        """Code bytes of the whole block."""
        return self.block_tokens // self.tile_tokens * self.tile_bytes

    @cached_property
    def planes(self) -> tuple[PlaneLayout, ...]:
        """The bit planes, in storage order."""
        out, offset, low = [], 0, 0
        slices = self.dim // SLICE_DIMS
        for bits in self.format.planes:
            if self.block_tokens == 1:
                words, tail = 0, slices
            elif bits <= 4:
                words, tail = divmod(slices, 4 // bits)
            else:
                words, tail = slices * bits // 4, 0
            out.append(PlaneLayout(bits, low, offset, words, tail))
            offset += self.tile_tokens * self.dim * bits // 8
            low += bits
        return tuple(out)

    def field_offset(self, index: int) -> int:
        """Region offset of 16-bit field ``index`` (0 scale, 1 zero) of token 0; tokens follow each other."""
        if not 0 <= index < self.format.field_count:
            raise SpecError(f"{self.format.word} stores {self.format.field_count} fields; there is no field {index}")
        return self.fields_offset + index * FIELD_BYTES * self.block_tokens

    def bit_positions(self, plane: PlaneLayout) -> np.ndarray:
        """Bit offset inside a tile's codes of every value's lowest plane bit: int64 [tile_tokens, dim]."""
        token = np.arange(self.tile_tokens)[:, None]
        dim = np.arange(self.dim)[None, :]
        row, col = (dim, token) if self.transposed else (token, dim)
        lane = 4 * (row % 8) + (col % 8) // 2
        row_high, col_high, col_low = (row % 16) // 8, (col % 16) // 8, col % 2
        number = 4 * col_high + 2 * col_low + row_high if self.transposed else 4 * row_high + 2 * col_high + col_low
        piece = dim // SLICE_DIMS
        if plane.bits <= 4:
            per_word = 4 // plane.bits
            word, bit = piece // per_word, 4 * number + plane.bits * (piece % per_word)
        else:
            word = piece * (plane.bits // 4) + number * plane.bits // 32
            bit = number * plane.bits % 32
        fragment = 32 * fragment_word(word, lane, plane.words) + bit
        first_tail = (self.dim // SLICE_DIMS - plane.tail_slices) * SLICE_DIMS
        rows = 8 * (plane.tail_offset + token * plane.tail_row_bytes) + plane.bits * (dim - first_tail)
        return 8 * plane.offset + np.where(dim < first_tail, fragment, rows).astype(np.int64)


def fragment_word(word: np.ndarray, lane: np.ndarray, words: int) -> np.ndarray:
    """Index of a lane's ``word``-th word: vectors of four words per lane, then of two, then of one."""
    quads, pairs = words & ~3, words & ~1
    in_quads = (word >> 2) * (4 * LANES) + lane * 4 + (word & 3)
    in_pairs = quads * LANES + lane * 2 + (word & 1)
    single = pairs * LANES + lane
    return np.where(word < quads, in_quads, np.where(word < pairs, in_pairs, single))


@dataclass(frozen=True)
class PageLayout:
    """The bytes of one block of ``block_tokens`` tokens of one KV head."""

    spec: CodecSpec
    block_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens not in BLOCK_SIZES:
            raise SpecError(f"block size {self.block_tokens} is not one of {', '.join(map(str, BLOCK_SIZES))}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, since every call of an operation looks up what it needs for a layout."""
        return hash((self.spec, self.block_tokens))

    def __getstate__(self) -> dict[str, object]:
        """Another process hashes strings differently: only the fields travel."""
        return {"spec": self.spec, "block_tokens": self.block_tokens}

    @cached_property
    def key(self) -> SideLayout:
        """Where the keys are."""
        return SideLayout(self.spec.key, self.spec.key_dim, self.block_tokens, 0, self._fields_start, False)

    @cached_property
    def value(self) -> SideLayout:
        """Where the values are."""
        key_bytes = self.block_tokens * self.spec.key_dim * self.spec.key.bits // 8
        fields = self._fields_start + FIELD_BYTES * self.block_tokens * self.spec.key.field_count
        return SideLayout(self.spec.value, self.spec.value_dim, self.block_tokens, key_bytes, fields, True)

    @property
    def _fields_start(self) -> int:
        bits = self.spec.key_dim * self.spec.key.bits + self.spec.value_dim * self.spec.value.bits
        return self.block_tokens * bits // 8

    @property
    def content_bytes(self) -> int:
        """Bytes of a region that mean something."""
        fields = self.spec.key.field_count + self.spec.value.field_count
        return self._fields_start + FIELD_BYTES * self.block_tokens * fields

    @cached_property
    def region_bytes(self) -> int:
        """Bytes of a region as allocated: ``content_bytes`` rounded up to 16."""
        return -(-self.content_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT

    @property
    def bytes_per_token(self) -> float:
        """Allocated bytes per token and KV head."""
        return self.region_bytes / self.block_tokens

    @property
    def compression_ratio(self) -> float:
        """bf16 bytes over allocated bytes."""
        return BF16_BYTES * (self.spec.key_dim + self.spec.value_dim) / self.bytes_per_token

    def pool_bytes(self, blocks: int, kv_heads: int) -> int:
        """Bytes of a pool of ``blocks`` blocks for ``kv_heads`` heads of one layer."""
        return blocks * kv_heads * self.region_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)


@cache
def page_layout(spec: CodecSpec, block_tokens: int) -> PageLayout:
    """One object for all layers of a kind: looking up what belongs to it then compares no fields."""
    return PageLayout(spec, block_tokens)
