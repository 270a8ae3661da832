"""Codes and fields to the bytes of a page and back, for every width, in ``PageLayout``'s order.

A token owns whole bytes of its block's page. So a page is a rearrangement of token *rows* (key code bytes, value
code bytes, fields), and storing a token is writing its row through ``byte_offsets``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

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
    row_byte: Tensor  # int64 [dim]: which byte of the token's row
    shift: Tensor  # uint8 [dim]: where in that byte
    position: Tensor  # int64 [block_size, dim]: which byte of the page


@dataclass(frozen=True)
class PageTables:
    """Index tensors of a layout on one device."""

    row_bytes: int
    byte_offsets: Tensor  # int64 [block_size, row_bytes]: where each byte of a token's row sits in the page
    key: tuple[Piece, ...]
    value: tuple[Piece, ...]
    key_fields: Tensor  # int64 [block_size, fields]: first byte of each field in the page
    value_fields: Tensor
    key_field_bytes: slice  # of the row
    value_field_bytes: slice


class _HostPiece(NamedTuple):
    width: int
    low_bit: int
    row_byte: np.ndarray
    shift: np.ndarray
    position: np.ndarray


def _side_pieces(side: SideLayout, row_start: int) -> tuple[list[_HostPiece], np.ndarray]:
    """Pieces of a side and the page offsets [block_size, bytes] of its row bytes."""
    tiles = np.arange(side.block_size) // side.tile_tokens
    base = side.codes_offset + tiles * side.tile_stride
    pieces, offsets = [], []
    for plane in side.planes:
        bits = np.tile(side.bit_positions(plane), (side.block_size // side.tile_tokens, 1))
        for part in range(max(1, plane.bits // 8)):
            position = base[:, None] + bits // 8 + part
            bytes_of_token, first_dim, row_byte = np.unique(position[0], return_index=True, return_inverse=True)
            low_bit = plane.low_bit + 8 * part
            pieces.append(_HostPiece(min(plane.bits, 8), low_bit, row_start + row_byte, bits[0] % 8, position))
            offsets.append(position[:, first_dim])
            row_start += len(bytes_of_token)
    return pieces, np.concatenate(offsets, 1)


def _tensor(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


def _to_device(pieces: list[_HostPiece], device: torch.device) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            p.width,
            p.low_bit,
            _tensor(p.row_byte, device),
            _tensor(p.shift, device, torch.uint8),
            _tensor(p.position, device),
        )
        for p in pieces
    )


@lru_cache(maxsize=256)
def page_tables(layout: PageLayout, device: torch.device) -> PageTables:
    """The tables of ``layout`` on ``device``; built once."""
    key, key_offsets = _side_pieces(layout.key, 0)
    value, value_offsets = _side_pieces(layout.value, key_offsets.shape[1])
    tokens = np.arange(layout.block_size)[:, None]

    def fields(side: SideLayout) -> np.ndarray:
        starts = [side.field_offset(i) for i in range(side.format.field_count)]
        return np.array(starts, dtype=np.int64)[None, :] + FIELD_BYTES * tokens

    field_bytes = [
        (f[..., None] + np.arange(FIELD_BYTES)).reshape(len(tokens), -1)
        for f in map(fields, (layout.key, layout.value))
    ]
    offsets = np.concatenate([key_offsets, value_offsets, *field_bytes], 1)
    codes_end = key_offsets.shape[1] + value_offsets.shape[1]
    key_end = codes_end + field_bytes[0].shape[1]

    return PageTables(
        row_bytes=offsets.shape[1],
        byte_offsets=_tensor(offsets, device),
        key=_to_device(key, device),
        value=_to_device(value, device),
        key_fields=_tensor(fields(layout.key), device),
        value_fields=_tensor(fields(layout.value), device),
        key_field_bytes=slice(codes_end, key_end),
        value_field_bytes=slice(key_end, offsets.shape[1]),
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
            f"keys of shape {tuple(key.codes.shape)} and values of shape {tuple(value.codes.shape)} do not pair up"
        )
    tables = page_tables(layout, key.codes.device)
    rows = torch.zeros(*key.codes.shape[:-1], tables.row_bytes, dtype=torch.uint8, device=key.codes.device)
    _put_codes(rows, key.codes, tables.key)
    _put_codes(rows, value.codes, tables.value)
    _put_fields(rows, key.fields, tables.key_field_bytes)
    _put_fields(rows, value.fields, tables.value_field_bytes)
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
    fields_start = width - FIELD_BYTES * side.format.field_count
    first_bytes = torch.arange(fields_start, width, FIELD_BYTES, device=rows.device)
    return Encoded(_take_codes(rows, side, pieces).squeeze(-2), _take_fields(rows, first_bytes))


@lru_cache(maxsize=256)
def _vector_pieces(side: SideLayout, device: torch.device) -> tuple[tuple[Piece, ...], int]:
    alone = replace(side, block_size=1, codes_offset=0, row_stride=0)
    pieces, _ = _side_pieces(alone, 0)
    pieces = [p._replace(row_byte=p.position[0]) for p in pieces]  # a page of one token is its row
    return _to_device(pieces, device), alone.codes_bytes + FIELD_BYTES * side.format.field_count


def pack_block(layout: PageLayout, key: Encoded, value: Encoded) -> Tensor:
    """Encoded K and V of the first n <= block_size tokens of blocks -> pages.

    [..., n, dim] -> uint8 [..., page_bytes]. Bytes of absent tokens and of the alignment are zero.
    """
    rows = pack_rows(layout, key, value)
    tokens = rows.shape[-2]
    if tokens > layout.block_size:
        raise InputError(f"{tokens} tokens do not fit a block of {layout.block_size}")
    offsets = page_tables(layout, rows.device).byte_offsets[:tokens]
    page = rows.new_zeros(*rows.shape[:-2], layout.page_bytes)
    page[..., offsets.reshape(-1)] = rows.flatten(-2)
    return page


def _join_pieces(taken: list[tuple[Piece, Tensor]], wide: bool) -> Tensor:
    """Bytes [..., dim] per piece -> codes: uint8, or int32 for codes of more than 8 bits."""
    codes = None
    for piece, byte in taken:
        bits = (byte >> piece.shift) & ((1 << piece.width) - 1)
        bits = bits.to(torch.int32) << piece.low_bit if wide else bits << piece.low_bit
        codes = bits if codes is None else codes | bits
    assert codes is not None
    return codes


def _take_codes(pages: Tensor, side: SideLayout, pieces: tuple[Piece, ...]) -> Tensor:
    taken = [(p, pages[..., p.position.reshape(-1)].unflatten(-1, p.position.shape)) for p in pieces]
    return _join_pieces(taken, wide=side.format.bits > 8)


def _take_fields(pages: Tensor, positions: Tensor) -> Tensor:
    flat = positions.reshape(-1)
    low, high = pages[..., flat].to(torch.int32), pages[..., flat + 1].to(torch.int32)
    return (low | high << 8).unflatten(-1, positions.shape)


def unpack_keys(layout: PageLayout, pages: Tensor) -> Encoded:
    """Pages uint8 [..., page_bytes] -> encoded keys [..., block_size, key_dim]."""
    tables = page_tables(layout, pages.device)
    return Encoded(_take_codes(pages, layout.key, tables.key), _take_fields(pages, tables.key_fields))


def unpack_values(layout: PageLayout, pages: Tensor) -> Encoded:
    """Pages uint8 [..., page_bytes] -> encoded values [..., block_size, value_dim]."""
    tables = page_tables(layout, pages.device)
    return Encoded(_take_codes(pages, layout.value, tables.value), _take_fields(pages, tables.value_fields))


def take_tokens(layout: PageLayout, pages: Tensor, slots: Tensor) -> tuple[Encoded, Encoded]:
    """The tokens in ``slots`` (int64 [tokens], >= 0) of pages uint8 [blocks, num_kv_heads, page_bytes].

    Returns encoded K [tokens, num_kv_heads, key_dim] and V [tokens, num_kv_heads, value_dim].
    """
    tables = page_tables(layout, pages.device)
    block, position = slots // layout.block_size, slots % layout.block_size
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]

    def take(offsets: Tensor) -> Tensor:  # [block_size, n] -> [tokens, num_kv_heads, n]
        return pages[block[:, None, None], heads, offsets[position][:, None, :]]

    def side(fmt: SideLayout, pieces: tuple[Piece, ...], fields: Tensor) -> Encoded:
        codes = _join_pieces([(p, take(p.position)) for p in pieces], wide=fmt.format.bits > 8)
        return Encoded(codes, take(fields).to(torch.int32) | take(fields + 1).to(torch.int32) << 8)

    return side(layout.key, tables.key, tables.key_fields), side(layout.value, tables.value, tables.value_fields)
