"""Formats and sizes: what is stored for one K or V vector, and the offset of each byte in a page.

Every byte count and offset in the project is a property of the frozen dataclasses in this file.

A *page* is one block of tokens of one KV head. Inside a page:

    key codes | value codes | 16-bit fields (key scale [, key zero], value scale [, value zero])

Codes are laid out in tiles of 16 tokens, in the register order of the tensor-core instruction
``mma.m16n8k16``, so that a lane of a warp loads its values as whole 32-bit words:

* a *slice* is 16 dimensions; lane ``4 g + t`` (g < 8, t < 4) owns 8 values of every 16 x 16 slice;
* keys:   tokens g and g + 8, dimensions 2t, 2t+1, 2t+8, 2t+9;
* values: dimensions g and g + 8, tokens 2t, 2t+1, 2t+8, 2t+9;
* the 8 values are numbered so that a token owns whole bytes: appending a token takes byte stores only.

A width is stored as *planes* of 1, 2, 4, 8, 16 or 32 bits (3 = 2 + 1, 5 = 4 + 1, ...), low bits first.
In a plane of w <= 4 bits one word holds 4 / w slices: value n of the j-th slice is at bit
``4 n + w j``, so one shift and one mask align any plane to nibbles. Slices that do not fill a word
(odd head sizes in 1- and 2-bit planes) follow as plain token rows. There is no padding.

Latents that are read token by token (sparse attention) are stored in *token rows* instead: the codes of a token's
latent and of its rope part side by side, dimension after dimension, one token after the other; then the fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from slimkv.arguments import typed, typed_fields
from slimkv.errors import InputError, SpecError
from slimkv.formats import (
    PRESET_NAMES,
    Kind,
    ScalePolicy,
    TensorFormat,
    is_latent_format,
    parse_format,
    parse_latent_format,
    parse_policy,
    raw,
)

LAYOUT_VERSION = 1
TILE_TOKENS = 16
SLICE_DIMS = 16
LANES = 32
FIELD_BYTES = 2
PAGE_ALIGNMENT = 16
BLOCK_SIZES = (1, 16, 32, 64, 128)
MAX_HEAD_DIM = 1024
DEFAULT_SEED = 0x51
BF16_BYTES = 2
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@typed_fields(SpecError)
@dataclass(frozen=True)
class CodecSpec:
    """The formats of K and V and the head sizes they are used with."""

    key: TensorFormat
    value: TensorFormat
    key_dim: int
    value_dim: int
    seed: int = DEFAULT_SEED
    name: str | None = field(default=None, compare=False, repr=False)  # the name passed to ``parse``

    def __post_init__(self) -> None:
        for name, dim in (("key", self.key_dim), ("value", self.value_dim)):
            if dim % SLICE_DIMS or not SLICE_DIMS <= dim <= MAX_HEAD_DIM:
                raise SpecError(
                    f"{name} head_dim {dim} is not supported: slimkv takes multiples of {SLICE_DIMS} "
                    f"from {SLICE_DIMS} to {MAX_HEAD_DIM}"
                )
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"seed {self.seed} is not in 0 .. 2**63 - 1")

    def __repr__(self) -> str:
        sides = (("key_policy", self.key), ("value_policy", self.value))
        policies = "".join(f", {name}={x.policy.value!r}" for name, x in sides if x.policy != ScalePolicy.NORM)
        dims = f"key_dim={self.key_dim}, value_dim={self.value_dim}"
        return f"{type(self).__name__}({self.canonical_format!r}, {dims}{policies}, seed={self.seed})"

    @classmethod
    @typed
    def parse(
        cls,
        format: str,
        head_dim: int,
        value_dim: int | None = None,
        *,
        key_policy: ScalePolicy | str | None = None,
        value_policy: ScalePolicy | str | None = None,
        seed: int = DEFAULT_SEED,
    ) -> CodecSpec:
        """Reads a format's name, such as ``k4v4``, ``kfp8vu4`` or ``turboquant_4bit_nc``.

        A number is the width of Lloyd-Max codes: ``k8v4`` has 8-bit keys and 4-bit values. vLLM's recipes
        keep their names: ``turboquant_k8v4`` has fp8 keys and uniform 4-bit values. A policy applies to Lloyd-Max
        sides only.
        """
        key, value = parse_format(format)
        name, value_dim = format.strip().lower(), head_dim if value_dim is None else value_dim
        return cls(key, value, head_dim, value_dim, seed, name).with_policies(key_policy, value_policy)

    def with_policies(self, key: ScalePolicy | str | None, value: ScalePolicy | str | None) -> CodecSpec:
        """The same spec with these scale policies on Lloyd-Max sides; None keeps a side's policy."""

        def side(fmt: TensorFormat, policy: ScalePolicy | str | None) -> TensorFormat:
            policy = fmt.policy if policy is None else parse_policy(policy)
            return replace(fmt, policy=policy) if fmt.kind == Kind.LLOYD else fmt

        return replace(self, key=side(self.key, key), value=side(self.value, value))

    @property
    def format(self) -> str:
        """The name passed to ``parse``, or the canonical one: ``parse(x).format == x``."""
        return self.name or self.canonical_format

    @property
    def canonical_format(self) -> str:
        """The same name for equal formats: ``fp8`` for ``kfp8vfp8``, for example."""
        plain = replace(self.key, policy=ScalePolicy.NORM), replace(self.value, policy=ScalePolicy.NORM)
        return PRESET_NAMES.get(plain) or f"k{self.key.name}v{self.value.name}"

    def is_lossless_for(self, dtype: str) -> bool:
        """Whether tensors of ``dtype``, given by name (``torch.bfloat16``), are stored bit for bit."""
        name = dtype.removeprefix("torch.")
        return all(side.kind == Kind.RAW and side.raw_dtype == name for side in (self.key, self.value))

    @typed
    def with_raw_dtype(self, dtype: str) -> CodecSpec:
        """The same spec with every ``raw`` side in ``dtype``, the dtype of the model.

        A side that names its dtype, such as ``rawbf16``, keeps it.
        """
        if not (self.key.dtype_of_model or self.value.dtype_of_model):
            return self
        key, value = (raw(dtype) if side.dtype_of_model else side for side in (self.key, self.value))
        return replace(self, key=key, value=value, name=None)

    @property
    def bits_per_number(self) -> float:
        """Stored bits over stored numbers, scales included, before any page alignment."""
        fields = 8 * FIELD_BYTES * (self.key.field_count + self.value.field_count)
        codes = self.key.bits * self.key_dim + self.value.bits * self.value_dim
        return (codes + fields) / (self.key_dim + self.value_dim)


@typed_fields(SpecError)
@dataclass(frozen=True, repr=False)
class LatentSpec(CodecSpec):
    """The formats of a latent (MLA), which all heads share, and of its rope part.

    In codecs, pages and operations the latent replaces K and the rope part replaces V, with one KV head.
    Scores use both, and the values are the latent again.
    """

    @classmethod
    def parse(  # type: ignore[override]  # a latent has other sizes than a head
        cls, format: str, latent_dim: int = 512, rope_dim: int = 64, *, seed: int = DEFAULT_SEED
    ) -> LatentSpec:
        """Reads a format's name: ``c4`` (4-bit latent, raw rope part), ``c4r8``, ``c6r8``, ``craw``."""
        latent, rope = parse_latent_format(format)
        return cls(latent, rope, latent_dim, rope_dim, seed, format.strip().lower())

    @property
    def canonical_format(self) -> str:
        """The same name for equal formats: ``c4`` for ``c4rraw``."""
        rope = "" if self.value == raw() else f"r{self.value.name}"
        return f"c{self.key.name}{rope}"


def parse_spec(
    format: str,
    key_dim: int,
    value_dim: int | None = None,
    *,
    key_policy: ScalePolicy | str | None = None,
    value_policy: ScalePolicy | str | None = None,
    seed: int = DEFAULT_SEED,
) -> CodecSpec:
    """``CodecSpec.parse``, or a ``LatentSpec`` for a format of latents (``c4``): the latent is K, its rope part V."""
    if not is_latent_format(format):
        return CodecSpec.parse(format, key_dim, value_dim, key_policy=key_policy, value_policy=value_policy, seed=seed)
    spec = LatentSpec.parse(format, key_dim, key_dim if value_dim is None else value_dim, seed=seed)
    return spec.with_policies(key_policy, value_policy)


@dataclass(frozen=True)
class PlaneLayout:
    """One bit plane of the codes of a tile (or of a token row)."""

    bits: int
    low_bit: int  # index of this plane's lowest bit in the code
    offset: int  # bytes from the start of the tile's codes of this side
    words: int  # 32-bit words per lane in fragment order
    tail_slices: int  # slices stored as token rows after them

    @property
    def tail_offset(self) -> int:
        """Bytes from the plane's start to its token rows."""
        return 4 * LANES * self.words

    @property
    def tail_row_bytes(self) -> int:
        """Bytes of one token in the token rows."""
        return self.tail_slices * SLICE_DIMS * self.bits // 8


@dataclass(frozen=True)
class SideLayout:
    """The offsets of the codes and fields of K (or V) in a page."""

    format: TensorFormat
    dim: int
    block_size: int
    codes_offset: int
    fields_offset: int
    transposed: bool  # values: the fragment's rows are dimensions
    row_stride: int = 0  # bytes between the codes of consecutive tokens in token rows; 0 for tiles

    @property
    def tile_tokens(self) -> int:
        """Tokens whose codes are laid out together (1 for plain token rows)."""
        return 1 if self.row_stride else min(self.block_size, TILE_TOKENS)

    @property
    def tile_stride(self) -> int:
        """Bytes between the codes of consecutive tiles."""
        return self.row_stride or self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        """Code bytes of one tile."""
        return self.tile_tokens * self.dim * self.format.bits // 8

    @property
    def codes_bytes(self) -> int:
        """Code bytes of the whole block."""
        return self.block_size // self.tile_tokens * self.tile_bytes

    @cached_property
    def planes(self) -> tuple[PlaneLayout, ...]:
        """The bit planes, in storage order."""
        out, offset, low = [], 0, 0
        slices = self.dim // SLICE_DIMS
        for bits in self.format.planes:
            if self.tile_tokens == 1:
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
        """Page offset of 16-bit field ``index`` (0 scale, 1 zero) of token 0; the other tokens follow."""
        if not 0 <= index < self.format.field_count:
            raise SpecError(f"{self.format.name} has {self.format.field_count} fields; there is no field {index}")
        return self.fields_offset + index * FIELD_BYTES * self.block_size

    def bit_positions(self, plane: PlaneLayout) -> np.ndarray:
        """The offset in bits, in a tile's codes, of every value's lowest bit of ``plane``: int64 [tile_tokens, dim]."""
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
    """Index of word ``word`` of a lane: vectors of four words per lane come first, then of two, then single words."""
    quads, pairs = words & ~3, words & ~1
    in_quads = (word >> 2) * (4 * LANES) + lane * 4 + (word & 3)
    in_pairs = quads * LANES + lane * 2 + (word & 1)
    single = pairs * LANES + lane
    return np.where(word < quads, in_quads, np.where(word < pairs, in_pairs, single))


@typed_fields(SpecError)
@dataclass(frozen=True)
class PageLayout:
    """The bytes of one block of ``block_size`` tokens of one KV head."""

    spec: CodecSpec
    block_size: int
    token_rows: bool = False  # the codes of a token are contiguous, for attention on single tokens

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise SpecError(f"block size {self.block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.token_rows and not isinstance(self.spec, LatentSpec):
            raise SpecError(f"token_rows is for latents, not for K and V of format {self.spec.format}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached, because every call of an operation looks up tables by layout."""
        return hash((self.spec, self.block_size, self.token_rows))

    def __getstate__(self) -> dict[str, object]:
        """Pickles only the fields: another process hashes strings differently."""
        return {"spec": self.spec, "block_size": self.block_size, "token_rows": self.token_rows}

    @cached_property
    def key(self) -> SideLayout:
        """The layout of the keys."""
        return SideLayout(
            self.spec.key, self.spec.key_dim, self.block_size, 0, self._fields_start, False, self._row_stride
        )

    @cached_property
    def value(self) -> SideLayout:
        """The layout of the values."""
        together = 1 if self.token_rows else self.block_size
        key_bytes = together * self.spec.key_dim * self.spec.key.bits // 8
        fields = self._fields_start + FIELD_BYTES * self.block_size * self.spec.key.field_count
        return SideLayout(
            self.spec.value, self.spec.value_dim, self.block_size, key_bytes, fields, True, self._row_stride
        )

    @property
    def plain_rows(self) -> bool:
        """Whether no codes are in fragment order."""
        return self.token_rows or self.block_size == 1

    @property
    def _row_stride(self) -> int:
        return self._fields_start // self.block_size if self.token_rows else 0

    @property
    def _fields_start(self) -> int:
        bits = self.spec.key_dim * self.spec.key.bits + self.spec.value_dim * self.spec.value.bits
        return self.block_size * bits // 8

    @property
    def content_bytes(self) -> int:
        """Bytes of a page without padding."""
        fields = self.spec.key.field_count + self.spec.value.field_count
        return self._fields_start + FIELD_BYTES * self.block_size * fields

    @cached_property
    def page_bytes(self) -> int:
        """Allocated bytes of a page: ``content_bytes`` rounded up to a multiple of 16."""
        return -(-self.content_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Bytes of a page that belong to one token."""
        return self.content_bytes // self.block_size

    @property
    def bytes_per_token(self) -> float:
        """Allocated bytes per token and KV head."""
        return self.page_bytes / self.block_size

    @property
    def compression_ratio(self) -> float:
        """bf16 bytes over allocated bytes."""
        return BF16_BYTES * (self.spec.key_dim + self.spec.value_dim) / self.bytes_per_token

    @typed
    def pool_bytes(self, blocks: int, num_kv_heads: int) -> int:
        """Bytes of a pool of ``blocks`` blocks for ``num_kv_heads`` heads of one layer."""
        return blocks * num_kv_heads * self.page_bytes

    @typed
    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)


def page_layout(spec: CodecSpec, block_size: int, token_rows: bool = False) -> PageLayout:
    """One object per layout and format name, because look-ups compare identities; the name decides on centred keys."""
    return _page_layout(spec, spec.name, block_size, token_rows)


@cache
def _page_layout(spec: CodecSpec, name: str | None, block_size: int, token_rows: bool) -> PageLayout:
    return PageLayout(spec, block_size, token_rows)


def parse_size(given: str | int) -> int:
    """``40GiB``, ``800 MB`` or plain bytes -> bytes."""
    text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII) if isinstance(text, str) else None
    if not match or match[2].lower() not in _UNITS:
        raise InputError(
            f"cannot read the memory size {given!r}; write a number and one of B, kB, MB, GB, KiB, MiB, GiB, TiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])
