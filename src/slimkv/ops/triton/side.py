"""The layout of K or V as a compile-time constant of Triton kernels."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from slimkv.codec.byte_levels import byte_words
from slimkv.codec.codebook import codebook
from slimkv.spec import Kind, SideLayout

KIND_NUMBER = {Kind.LLOYD: 0, Kind.UNIFORM: 1, Kind.FP8: 2, Kind.RAW: 3}
LLOYD, UNIFORM, FP8, RAW = (tl.constexpr(number) for number in KIND_NUMBER.values())
PLAIN_ROWS = "the kernels need tiles of 16 tokens, not blocks of 1 token or token rows; use backend='reference'"


@dataclass(frozen=True, repr=False)
class Side:
    """The layout of K or V in a page: one compile-time constant."""

    BLOCK_SIZE: int
    D: int
    SP: int  # slices of 16 dimensions, padded to a power of two
    KIND: int
    BITS: int
    BF16: bool  # raw: bfloat16, not float16
    ROTATED: bool
    CODES: int
    FIELDS: int
    TRANSPOSED: bool  # values
    TABLE0: int  # the centroid table of inline PTX (``byte_table``)
    TABLE1: int
    PTX: bool  # inline PTX looks up Lloyd-Max levels of up to 4 bits

    def __repr__(self) -> str:
        """Part of the names of compiled functions and of their cache keys."""
        return "Side_" + "_".join(str(int(x) & 0xFFFFFFFF) for x in astuple(self))


@lru_cache(maxsize=256)
def side_of(side: SideLayout) -> Side:
    """The constant of ``side``."""
    fmt, dim, tables = side.format, side.dim, (0, 0)
    ptx = fmt.kind == Kind.LLOYD and fmt.bits <= 4 and not triton.knobs.runtime.interpret and bool(torch.version.cuda)
    if ptx:
        tables = byte_table(codebook(fmt.bits, dim).levels_by_code.tolist(), fmt.bits)
    return Side(
        side.block_size, dim, triton.next_power_of_2(dim // 16), KIND_NUMBER[fmt.kind], fmt.bits,
        fmt.raw_dtype == "bfloat16", fmt.rotated, side.codes_offset, side.fields_offset, side.transposed, *tables, ptx,
    )  # fmt: skip


def byte_table(levels_by_code: list[float], bits: int) -> tuple[int, int]:
    """The 8 entries of the centroid table as two int32: entry i is 0xFF ^ (64 + magnitude_i - 0.5)."""
    half = 1 << (bits - 1)
    entries = [0xFF ^ (64 + int(levels_by_code[half + min(i, half - 1)] - 0.5)) for i in range(8)]
    return byte_words(entries, signed=True)
