"""Inputs of the store kernels: arguments, launch plan, and tables for rounding."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slimkv.codec.codebook import LEVEL_DENOMINATOR, Codebook, codebook
from slimkv.codec.quantize import SideTables
from slimkv.ops.cuda.arguments import arguments
from slimkv.ops.cuda.module import Defines
from slimkv.spec import Kind, SideLayout, TensorFormat

RECORD_BITS = 6  # wider codes have too many cells


SideArgs, StoreArgs = arguments("store/format.cuh", "SideArgs", "StoreArgs")


def point_side(args: ctypes.Structure, side: SideLayout, constants: SideTables, tables: Sequence[Tensor]) -> None:
    """Fills in a side's constant arguments. tables: the rotation (fragments, or signs), cells, bounds and levels."""
    args.fragments, args.cells, args.bounds, args.levels = (t.data_ptr() for t in tables)
    args.unit = constants.unit
    args.by_256, args.one, args.minus_one = 256, 1, -1
    if side.format.kind == Kind.LLOYD and side.format.bits <= 4:
        doubled = np.zeros(8, np.uint8)
        positive = 2 * codebook(side.format.bits, side.dim).levels[1 << (side.format.bits - 1) :]
        doubled[: len(positive)] = positive
        args.doubled_levels[:] = doubled.view(np.uint32).tolist()


@dataclass(frozen=True)
class Plan:
    """How requests of one kind are compiled and launched, and their constant arguments."""

    source: str
    kernel: str
    defines: Defines
    threads: int
    shared: int
    tiles_per_block: int
    resident: int  # blocks that run concurrently; 0: unknown, or no warp takes more than one tile
    args: ctypes.Structure  # StoreArgs
    tables: tuple[Tensor, ...]  # args point to these


def code_tables(
    fmt: TensorFormat, dim: int, unit: float, device: torch.device, error_steps: float = 1.0
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor]]:
    """The shift, the index of cell 0 and the tables (cells, bounds, levels); see ``cells``.

    Up to 4 bits, the cells' levels times ``error_steps`` follow the cells as floats; up to ``RECORD_BITS``, the
    cells' ``CellRecord`` entries do.
    """
    nothing = torch.zeros(0, device=device)
    if fmt.kind != Kind.LLOYD:
        return 0, 8, (nothing, nothing, nothing)
    book = codebook(fmt.bits, dim)
    shift, zero, numbers = cells(book, unit * math.sqrt(dim))
    levels = torch.tensor(book.levels_by_code * LEVEL_DENOMINATOR, dtype=torch.int32, device=device)
    bounds = nothing
    if fmt.bits > 4:
        bounds = torch.tensor([*book.boundaries, math.inf], dtype=torch.float32, device=device)
    if fmt.bits <= 4:
        scaled = (error_steps * book.levels_by_code).astype(np.float32)[numbers]
        numbers = np.concatenate([numbers, scaled.view(np.uint8)])
    elif fmt.bits <= RECORD_BITS:
        numbers = np.concatenate([numbers, _cell_records(book, numbers, error_steps)])
    return shift, zero, (torch.from_numpy(numbers).to(device), bounds, levels)


def _cell_records(book: Codebook, below: np.ndarray, error_steps: float) -> np.ndarray:
    """The ``CellRecord`` (store/round.cuh) of every cell: uint8. ``below``: the boundaries below each cell."""
    half, top = 1 << (book.bits - 1), (1 << book.bits) - 1
    index = np.stack([below, np.minimum(below.astype(np.int32) + 1, top)]).astype(np.int32)
    codes = np.where(index >= half, index, half - 1 - index)
    levels = (error_steps * book.levels_by_code).astype(np.float32)[codes]
    bounds = np.append(book.boundaries, np.inf).astype(np.float32)[below]
    records = np.stack([bounds.view(np.uint32), *levels.view(np.uint32), (codes[0] | codes[1] << 16).astype(np.uint32)])
    return np.ascontiguousarray(records.T).view(np.uint8).reshape(-1)


def cells(book: Codebook, largest: float) -> tuple[int, int, np.ndarray]:
    """Divides the number line into cells (a, a + 2^-shift]: shift, the index of the cell of 0, an entry per cell.

    Up to 4 bits, boundaries are edges of cells and the entry is a code. Otherwise the entry is the number of boundaries
    below the cell, and at most one boundary lies inside. Entries are uint8.
    """
    bounds = book.boundaries
    for shift in range(8):
        scaled = bounds * 2**shift
        if np.all(scaled == np.floor(scaled)) if book.bits <= 4 else np.all(np.diff(np.ceil(scaled)) > 0):
            break
    else:
        raise AssertionError(f"no cells separate the boundaries of {book.bits} bits for {book.dim} dimensions")
    # A norm of short integers may be 3.2% too small; the factor covers 3%, and 8 more cells the rest.
    zero = math.ceil(largest * 2**shift * 1.03) + 8
    zero += -zero % 8
    upper = np.arange(2 * zero) - zero
    below = (scaled[None, :] < upper[:, None]).sum(1) if book.bits <= 4 else (scaled <= upper[:, None] - 1).sum(1)
    half = 1 << (book.bits - 1)
    if book.bits <= 4:
        below = np.where(below >= half, below, half - 1 - below)
    return shift, zero, below.astype(np.uint8)
