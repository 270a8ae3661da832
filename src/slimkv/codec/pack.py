"""Packs codes and fields into the bytes of a page and unpacks them, for every width, in ``PageLayout``'s order.

A token owns whole bytes of its block's page. So a page is a rearrangement of token *rows* (key code bytes, value
code bytes, fields), and a token is stored by writing its row through ``byte_offsets``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from slimkv.codec.quantize import Encoded
from slimkv.errors import InputError
from slimkv.spec import FIELD_BYTES, PageLayout, SideLayout


@dataclass(frozen=True)
class Piece:
    """Up to 8 consecutive bits of a code that are stored in one byte, for every dimension of a vector."""

    width: int
    low_bit: int
    row_byte: Tensor  # int64 [dim]: index of the byte in the token's row
    shift: Tensor  # uint8 [dim]: index of the lowest bit in that byte
    position: Tensor  # int64 [block_size, dim]: index of the byte in the page


@dataclass(frozen=True)
class PageTables:
    """Index tensors of a layout on one device."""

    row_bytes: int
    byte_offsets: Tensor  # int64 [block_size, row_bytes]: page offset of each byte of a token's row
    key: tuple[Piece, ...]
    value: tuple[Piece, ...]
    key_fields: slice  # bytes of the row
    value_fields: slice


def _tensor(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


def _side_pieces(side: SideLayout, row_start: int, device: torch.device) -> tuple[tuple[Piece, ...], np.ndarray]:
    """Pieces of a side and the page offsets [block_size, bytes] of its row bytes."""
    tiles = np.arange(side.block_size) // side.tile_tokens
    base = side.codes_offset + tiles * side.tile_stride
    pieces, offsets = [], []
    for plane in side.planes:
        bits = np.tile(side.bit_positions(plane), (side.block_size // side.tile_tokens, 1))
        shift = _tensor(bits[0] % 8, device, torch.uint8)
        for part in range(max(1, plane.bits // 8)):
            position = base[:, None] + bits // 8 + part
            bytes_of_token, first_dim, byte = np.unique(position[0], return_index=True, return_inverse=True)
            row_byte, width, low_bit = _tensor(row_start + byte, device), min(plane.bits, 8), plane.low_bit + 8 * part
            pieces.append(Piece(width, low_bit, row_byte, shift, _tensor(position, device)))
            offsets.append(position[:, first_dim])
            row_start += len(bytes_of_token)
    return tuple(pieces), np.concatenate(offsets, 1)


@lru_cache(maxsize=256)
def page_tables(layout: PageLayout, device: torch.device) -> PageTables:
    """The tables of ``layout`` on ``device``; built once."""
    key, key_offsets = _side_pieces(layout.key, 0, device)
    value, value_offsets = _side_pieces(layout.value, key_offsets.shape[1], device)
    tokens = np.arange(layout.block_size)[:, None]

    field_bytes = [
        side.field_offset(i) + FIELD_BYTES * tokens + np.arange(FIELD_BYTES)
        for side in (layout.key, layout.value)
        for i in range(side.format.field_count)
    ]
    offsets = np.concatenate([key_offsets, value_offsets, *field_bytes], 1)
    codes_end = key_offsets.shape[1] + value_offsets.shape[1]
    key_end = codes_end + FIELD_BYTES * layout.spec.key.field_count
    return PageTables(
        row_bytes=offsets.shape[1],
        byte_offsets=_tensor(offsets, device),
        key=key,
        value=value,
        key_fields=slice(codes_end, key_end),
        value_fields=slice(key_end, offsets.shape[1]),
    )


def _put_codes(rows: Tensor, codes: Tensor, pieces: tuple[Piece, ...]) -> None:
    for piece in pieces:
        bits = (codes >> piece.low_bit) & ((1 << piece.width) - 1)
        index = piece.row_byte.expand(codes.shape)
        rows.scatter_add_(-1, index, (bits.to(torch.uint8) << piece.shift))


def _put_fields(rows: Tensor, fields: Tensor, where: slice) -> None:
    both = torch.stack([fields & 0xFF, fields >> 8], -1).to(torch.uint8)
    rows[..., where] = both.flatten(-2)


def pack_rows(layout: PageLayout, key: Encoded, value: Encoded) -> Tensor:
    """Encoded K and V of the same batch shape [...] -> token rows: uint8 [..., row_bytes]."""
    if key.codes.shape[:-1] != value.codes.shape[:-1]:
        raise InputError(
            f"keys {list(key.codes.shape)} and values {list(value.codes.shape)} must have the same batch shape"
        )
    tables = page_tables(layout, key.codes.device)
    rows = torch.zeros(*key.codes.shape[:-1], tables.row_bytes, dtype=torch.uint8, device=key.codes.device)
    _put_codes(rows, key.codes, tables.key)
    _put_codes(rows, value.codes, tables.value)
    _put_fields(rows, key.fields, tables.key_fields)
    _put_fields(rows, value.fields, tables.value_fields)
    return rows


def pack_vectors(side: SideLayout, encoded: Encoded) -> Tensor:
    """Vectors of one side as plain rows of codes and fields: [..., dim] -> uint8 [..., code bytes + field bytes]."""
    pieces, width = _vector_pieces(side, encoded.codes.device)
    rows = torch.zeros(*encoded.codes.shape[:-1], width, dtype=torch.uint8, device=encoded.codes.device)
    _put_codes(rows, encoded.codes, pieces)
    _put_fields(rows, encoded.fields, slice(width - FIELD_BYTES * side.format.field_count, width))
    return rows


def unpack_vectors(side: SideLayout, rows: Tensor) -> Encoded:
    """The inverse of ``pack_vectors``."""
    pieces, width = _vector_pieces(side, rows.device)
    if rows.dtype != torch.uint8 or rows.ndim == 0 or rows.shape[-1] != width:
        raise InputError(
            f"packed {side.format.name} vectors are uint8 rows of {width} bytes, not {rows.dtype} of "
            f"{rows.shape[-1] if rows.ndim else 1}"
        )
    return _unpacked(rows, pieces, slice(width - FIELD_BYTES * side.format.field_count, width), side)


@lru_cache(maxsize=256)
def _vector_pieces(side: SideLayout, device: torch.device) -> tuple[tuple[Piece, ...], int]:
    alone = replace(side, block_size=1, codes_offset=0, row_stride=0)
    pieces = (replace(p, row_byte=p.position[0]) for p in _side_pieces(alone, 0, device)[0])  # its page is one row
    return tuple(pieces), alone.codes_bytes + FIELD_BYTES * side.format.field_count


def _unpacked(rows: Tensor, pieces: tuple[Piece, ...], fields: slice, side: SideLayout) -> Encoded:
    """A side's codes (uint8, or int32 if they have more than 8 bits) and fields from rows uint8 [..., bytes]."""
    dtype = torch.int32 if side.format.bits > 8 else torch.uint8
    bits = (((rows[..., p.row_byte] >> p.shift) & ((1 << p.width) - 1)).to(dtype) << p.low_bit for p in pieces)
    low, high = rows[..., fields].to(torch.int32).unflatten(-1, (-1, FIELD_BYTES)).unbind(-1)
    return Encoded(reduce(torch.bitwise_or, bits), low | high << 8)


def token_bytes(layout: PageLayout, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index tensors of the rows of the tokens in ``slots`` (int64 [tokens], >= 0).

    ``pages[token_bytes(...)]`` is uint8 [tokens, num_kv_heads, row_bytes].
    """
    offsets = page_tables(layout, pages.device).byte_offsets[slots % layout.block_size]
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    return (slots // layout.block_size)[:, None, None], heads, offsets[:, None, :]


def take_tokens(layout: PageLayout, pages: Tensor, slots: Tensor) -> tuple[Encoded, Encoded]:
    """The tokens in ``slots`` (int64 [tokens], >= 0) of pages uint8 [blocks, num_kv_heads, page_bytes].

    Returns encoded K [tokens, num_kv_heads, key_dim] and V [tokens, num_kv_heads, value_dim].
    """
    tables, rows = page_tables(layout, pages.device), pages[token_bytes(layout, pages, slots)]
    key = _unpacked(rows, tables.key, tables.key_fields, layout.key)
    return key, _unpacked(rows, tables.value, tables.value_fields, layout.value)
