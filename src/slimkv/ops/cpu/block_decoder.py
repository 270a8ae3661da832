"""Decoding whole blocks on a CPU: one table lookup turns a byte into the numbers it holds.

Numbers come out in the order of a token's bytes; a query is put into that order (and an output taken out of it), which
is cheaper than reordering the cache. Scales stay beside them, to be applied to scores and weights instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slimkv.codec import Codec, scale16
from slimkv.codec.codebook import codebook
from slimkv.codec.pack import page_tables, unpack_keys, unpack_values
from slimkv.spec import FIELD_BYTES, Kind, PageLayout, SideLayout

_CONTAINER = {1: torch.int32, 2: torch.int64}  # float32 numbers that one lookup moves


@dataclass(frozen=True)
class Decoded:
    """One side of a sequence in its stored space: x[head, token, d] = numbers[..., d] * scale + zero."""

    numbers: Tensor  # float32 [num_kv_heads, tokens, dim]
    order: Tensor | None  # int64 [dim]: numbers[..., i] is dimension order[i]; None: as they are
    scale: Tensor | None  # float32 [num_kv_heads, tokens]
    zero: Tensor | None  # float32 [num_kv_heads, tokens]

    def first(self, tokens: int) -> Decoded:
        """The first ``tokens`` tokens, as views."""
        return self.part(0, tokens)

    def part(self, begin: int, end: int) -> Decoded:
        """The tokens from ``begin`` to ``end``, as views."""
        scale, zero = (None if x is None else x[:, begin:end] for x in (self.scale, self.zero))
        return Decoded(self.numbers[:, begin:end], self.order, scale, zero)

    def values(self) -> Tensor:
        """x, in the order of its dimensions: float32 [num_kv_heads, tokens, dim]."""
        x = self.numbers
        if self.scale is not None:
            x = x * self.scale[..., None]
        if self.zero is not None:
            x = x + self.zero[..., None]
        return x if self.order is None else x[..., _inverse(self.order)]


def _inverse(order: Tensor) -> Tensor:
    out = torch.empty_like(order)
    out[order] = torch.arange(len(order))
    return out


@dataclass(frozen=True)
class _Lookup:
    bytes_of: Tensor  # int64 [block_size * row bytes]: where a block's bytes sit, token by token
    table: Tensor  # [256] of the container, or float32 [256, numbers per byte]
    per_byte: int
    order: Tensor  # int64 [dim]


@lru_cache(maxsize=64)
def _lookup(layout: PageLayout, transposed: bool) -> _Lookup | None:
    """The lookup of a side whose codes are one plane of whole or part bytes; None for several planes."""
    side = layout.value if transposed else layout.key
    fmt = side.format
    if len(fmt.planes) != 1:
        return None
    tables = page_tables(layout, torch.device("cpu"))
    piece = (tables.value if transposed else tables.key)[0]
    per_byte = 8 // fmt.bits
    row_byte, shift = piece.row_byte.numpy(), piece.shift.numpy()
    rank = np.lexsort((shift, row_byte))  # dimensions in the order in which the bytes hold them
    start = row_byte.min()
    columns = tables.byte_offsets[:, start : start + side.dim // per_byte]
    byte = np.arange(256, dtype=np.uint8)
    codes = np.stack([byte >> (fmt.bits * i) & ((1 << fmt.bits) - 1) for i in range(per_byte)], 1)
    table = torch.from_numpy(_numbers_by_code(side)[codes].astype(np.float32)).contiguous()
    if per_byte in _CONTAINER:
        table = table.view(_CONTAINER[per_byte]).reshape(256)
    return _Lookup(columns.reshape(-1).contiguous(), table, per_byte, torch.from_numpy(rank.copy()))


def _numbers_by_code(side: SideLayout) -> np.ndarray:
    fmt = side.format
    if fmt.kind == Kind.LLOYD:
        return codebook(fmt.bits, side.dim).levels_by_code
    if fmt.kind == Kind.FP8:
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return np.arange(1 << fmt.bits, dtype=np.float64)


def decode_side(pages: Tensor, layout: PageLayout, codec: Codec, transposed: bool) -> Decoded:
    """Blocks uint8 [blocks, num_kv_heads, page_bytes] -> their keys, or values with ``transposed``."""
    side = layout.value if transposed else layout.key
    by_head = pages.transpose(0, 1)  # [num_kv_heads, blocks, page_bytes]
    if side.format.kind == Kind.RAW:
        return Decoded(_raw_numbers(by_head, layout, transposed), None, None, None)
    lookup = _lookup(layout, transposed)
    if lookup is None:
        encoded = (unpack_values if transposed else unpack_keys)(layout, by_head)
        decode = codec.decode_value if transposed else codec.decode_key
        return Decoded(decode(encoded, rotated=True).float().flatten(1, 2), None, None, None)
    codes = by_head[:, :, lookup.bytes_of].to(torch.int32).flatten()
    numbers = lookup.table.index_select(0, codes)
    if lookup.per_byte in _CONTAINER:
        numbers = numbers.view(torch.float32)
    numbers = numbers.reshape(by_head.shape[0], -1, side.dim)
    unsigned, signed = _field_tables()
    scale = _field(by_head, side, 0, unsigned)
    zero = _field(by_head, side, 1, signed) if side.format.field_count > 1 else None
    return Decoded(numbers, lookup.order, scale, zero)


@lru_cache(maxsize=64)
def _raw_positions(layout: PageLayout, transposed: bool) -> Tensor:
    """int64 [block_size * dim]: where a block's raw numbers sit, counted in numbers."""
    tables = page_tables(layout, torch.device("cpu"))
    side, first_byte = (layout.value, tables.value[0]) if transposed else (layout.key, tables.key[0])
    return (first_byte.position // (side.format.bits // 8)).reshape(-1)


def _raw_numbers(by_head: Tensor, layout: PageLayout, transposed: bool) -> Tensor:
    """Raw numbers of whole blocks, moved as words: float32 [num_kv_heads, tokens, dim]."""
    side = layout.value if transposed else layout.key
    words = by_head.view(torch.int16 if side.format.bits == 16 else torch.int32)
    taken = words[:, :, _raw_positions(layout, transposed)].view(getattr(torch, side.format.raw_dtype))
    return taken.float().reshape(by_head.shape[0], -1, side.dim)


@lru_cache(maxsize=1)
def _field_tables() -> tuple[Tensor, Tensor]:
    """Every value that an unsigned and a signed 16-bit field can have: float32 [65536] each."""
    codes = torch.arange(1 << 16, dtype=torch.int32)
    return scale16.decode_unsigned(codes), scale16.decode_signed(codes)


def _field(by_head: Tensor, side: SideLayout, index: int, table: Tensor) -> Tensor:
    """A 16-bit field of every token: float32 [num_kv_heads, tokens]."""
    start = side.field_offset(index)
    held = by_head[:, :, start : start + FIELD_BYTES * side.block_size].contiguous().view(torch.uint16)
    return table.index_select(0, held.to(torch.int32).flatten()).view(by_head.shape[0], -1)
