"""The structures of ``source/types.h``, and a layout's tables as one of them."""

from __future__ import annotations

import ctypes
from ctypes import Structure
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.pack import Piece, page_tables
from slimkv.codec.quantize import SideTables
from slimkv.codec.rotation import block_size, core_matrix, sign_bits
from slimkv.ops.structures import declared
from slimkv.spec import Kind, PageLayout, SideLayout

KINDS = {Kind.LLOYD: 0, Kind.UNIFORM: 1, Kind.FP8: 2, Kind.RAW: 3}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


CPlane, CPiece, CSide, CLayout, CPages, CVectors, CFault, CTokensCall, CAttendCall = declared(
    "slimkv.ops.cpu", "types.h", "Plane", "Piece", "Side", "Layout", "Pages", "Vectors", "Fault", "TokensCall",
    "AttendCall",
)  # fmt: skip


def pages_of(pages: Tensor) -> Structure:
    """``Pages`` of a tensor uint8 [blocks, num_kv_heads, page_bytes]."""
    return CPages(pages.data_ptr(), pages.stride(0), pages.stride(1), pages.shape[0], pages.shape[1], 0)


def vectors_of(x: Tensor) -> Structure:
    """``Vectors`` of a tensor [tokens, heads, dim] with a contiguous last axis."""
    return CVectors(x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype], 0)


def tokens_call(tables: LayoutTables, request: Any, slots: Tensor, **options: Any) -> Structure:
    """``TokensCall`` of a store or gather request; ``slots``: those of the request, contiguous."""
    return CTokensCall(
        layout=tables.address, pages=pages_of(request.pages), key=vectors_of(request.key),
        value=vectors_of(request.value), slots=slots.data_ptr(), tokens=slots.shape[0],
        wide_slots=slots.dtype == torch.int64, **options,
    )  # fmt: skip


class LayoutTables:
    """A ``CLayout`` and the arrays it points to, which live as long as it does."""

    def __init__(self, layout: PageLayout, codec: Codec) -> None:
        self._kept: list[Any] = []
        tables = page_tables(layout, torch.device("cpu"))
        self.structure = CLayout(
            self._side(layout.key, codec.key_tables, tables.key, codec.spec.seed),
            self._side(layout.value, codec.value_tables, tables.value, codec.spec.seed),
            layout.block_size,
            tables.row_bytes,
            layout.page_bytes,
            self._keep(tables.byte_offsets.numpy(), np.int32),
        )
        self.address = ctypes.addressof(self.structure)

    def _keep(self, array: np.ndarray, dtype: type) -> int:
        """The address of a copy of ``array`` as ``dtype``, which is kept alive."""
        copy: np.ndarray = np.ascontiguousarray(array, dtype=dtype)
        self._kept.append(copy)
        return copy.ctypes.data

    def _side(self, side: SideLayout, tables: SideTables, pieces: tuple[Piece, ...], seed: int) -> Structure:
        form = side.format
        core = core_matrix(side.dim)
        out = CSide(
            kind=KINDS[form.kind], bits=form.bits, dim=side.dim, rotated=form.rotated,
            raw_dtype=DTYPES[getattr(torch, form.raw_dtype)], field_count=form.field_count,
            block_size=side.block_size, codes_offset=side.codes_offset, tile_bytes=side.tile_bytes,
            plane_count=len(side.planes), piece_count=len(pieces), hadamard_block=block_size(side.dim),
            core=len(core), core_matrix=self._keep(core, np.int8),
            signs=self._keep(sign_bits(side.dim, seed), np.float32),
            levels=self._keep(tables.levels.numpy(), np.float32),
            boundaries=self._keep(tables.boundaries.numpy(), np.float32),
            unit=tables.unit, orthonormal=tables.orthonormal, error_steps=tables.error_steps,
        )  # fmt: skip
        for i in range(form.field_count):
            out.field_offset[i] = side.field_offset(i)
        for i, plane in enumerate(side.planes):
            out.planes[i] = CPlane(plane.bits, plane.low_bit, plane.offset, plane.words, plane.tail_slices)
        for i, piece in enumerate(pieces):
            out.pieces[i] = CPiece(
                piece.width,
                piece.low_bit,
                self._keep(piece.row_byte.numpy(), np.int32),
                self._keep(piece.shift.numpy(), np.uint8),
                self._keep(piece.position.numpy(), np.int32),
            )
        return out
