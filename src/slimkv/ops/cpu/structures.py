"""The structures of ``source/types.h``, field by field, and a layout's tables as one of them."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.pack import Piece, page_tables
from slimkv.codec.quantize import SideTables
from slimkv.codec.rotation import block_size, sign_bits, signed_hadamard
from slimkv.spec import Kind, PageLayout, SideLayout

KINDS = {Kind.LLOYD: 0, Kind.UNIFORM: 1, Kind.FP8: 2, Kind.RAW: 3}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class CPlane(Structure):
    """``Plane``."""

    _fields_ = [(name, c_int32) for name in ("bits", "low_bit", "offset", "words", "tail_slices")]


class CPiece(Structure):
    """``Piece``."""

    _fields_ = [
        ("width", c_int32),
        ("low_bit", c_int32),
        ("row_byte", c_void_p),
        ("shift", c_void_p),
        ("position", c_void_p),
    ]


class CSide(Structure):
    """``Side``."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "bits", "dim")),
        *((name, c_int32) for name in ("rotated", "raw_dtype", "field_count", "block_size")),
        ("codes_offset", c_int32),
        ("tile_bytes", c_int32),
        ("field_offset", c_int32 * 2),
        ("plane_count", c_int32),
        ("piece_count", c_int32),
        ("planes", CPlane * 3),
        ("pieces", CPiece * 4),
        ("hadamard_block", c_int32),
        ("core", c_int32),
        *((name, c_void_p) for name in ("core_matrix", "signs", "levels", "boundaries")),
        *((name, c_float) for name in ("unit", "orthonormal", "error_steps")),
    ]


class CLayout(Structure):
    """``Layout``."""

    _fields_ = [
        ("key", CSide),
        ("value", CSide),
        ("block_size", c_int32),
        ("row_bytes", c_int32),
        ("page_bytes", c_int64),
        ("byte_offsets", c_void_p),
    ]


class CPages(Structure):
    """``Pages``."""

    _fields_ = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("blocks", c_int64),
        ("heads", c_int32),
        ("padding", c_int32),
    ]


class CVectors(Structure):
    """``Vectors``."""

    _fields_ = [
        ("data", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("dtype", c_int32),
        ("padding", c_int32),
    ]


class CFault(Structure):
    """``Fault``."""

    _fields_ = [(name, c_int64) for name in ("where", "index", "value", "limit")]


class CStoreCall(Structure):
    """``StoreCall``."""

    _fields_ = [
        ("layout", c_void_p),
        ("pages", CPages),
        ("key", CVectors),
        ("value", CVectors),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("wide_slots", c_int32),
        ("threads", c_int32),
        ("query_aware", c_void_p),
        ("query_aware_index", c_void_p),
        ("matrices", c_int64),
        ("fault", CFault),
    ]


class CGatherCall(Structure):
    """``GatherCall``."""

    _fields_ = [
        ("layout", c_void_p),
        ("pages", CPages),
        ("key", CVectors),
        ("value", CVectors),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("wide_slots", c_int32),
        ("keep_rotated", c_int32),
        ("threads", c_int32),
        ("padding", c_int32),
        ("fault", CFault),
    ]


class CAttendCall(Structure):
    """``AttendCall``."""

    _fields_ = [
        ("layout", c_void_p),
        ("pages", CPages),
        ("query", CVectors),
        ("out", CVectors),
        ("fresh_key", CVectors),
        ("fresh_value", CVectors),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("table_width", c_int64),
        ("seq_lens", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("sequences", c_int64),
        ("total_queries", c_int64),
        ("heads", c_int32),
        ("causal", c_int32),
        ("window", c_int64),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("sink_stride", c_int64),
        ("score_shift", c_void_p),
        ("lse", c_void_p),
        ("threads", c_int32),
        ("padding", c_int32),
        ("fault", CFault),
    ]


SIZES = tuple(ctypes.sizeof(s) for s in (CSide, CLayout, CStoreCall, CGatherCall, CAttendCall))


def pages_of(pages: Tensor) -> CPages:
    """uint8 [blocks, num_kv_heads, page_bytes]."""
    return CPages(pages.data_ptr(), pages.stride(0), pages.stride(1), pages.shape[0], pages.shape[1], 0)


def vectors_of(x: Tensor) -> CVectors:
    """[tokens, heads, dim] with a contiguous last axis."""
    return CVectors(x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype], 0)


def hadamard_core(dim: int, seed: int) -> tuple[int, np.ndarray]:
    """(m, int8 [m, m]): a block of the rotation is Sylvester's matrix times this one, by Kronecker's product."""
    block = block_size(dim)
    matrix = signed_hadamard(dim, seed)[:block, :block] * sign_bits(dim, seed)[:block, None]
    doubled = np.array([[1, 1], [1, -1]])
    while block % 2 == 0 and np.array_equal(matrix, np.kron(doubled, matrix[: block // 2, : block // 2])):
        block //= 2
        matrix = matrix[:block, :block]
    return block, np.ascontiguousarray(matrix, dtype=np.int8)


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
        """The address of ``array`` as ``dtype``, which is kept."""
        copy: np.ndarray = np.ascontiguousarray(array, dtype=dtype)
        self._kept.append(copy)
        return copy.ctypes.data

    def _side(self, side: SideLayout, tables: SideTables, pieces: tuple[Piece, ...], seed: int) -> CSide:
        form = side.format
        core, matrix = hadamard_core(side.dim, seed)
        out = CSide(
            kind=KINDS[form.kind], bits=form.bits, dim=side.dim, rotated=form.rotated,
            raw_dtype=DTYPES[getattr(torch, form.raw_dtype)], field_count=form.field_count,
            block_size=side.block_size, codes_offset=side.codes_offset, tile_bytes=side.tile_bytes,
            plane_count=len(side.planes), piece_count=len(pieces), hadamard_block=block_size(side.dim), core=core,
            core_matrix=self._keep(matrix, np.int8), signs=self._keep(sign_bits(side.dim, seed), np.float32),
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
