"""Inputs of the store kernels: arguments, the plan of a launch, and tables of codes."""

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
    """Fills in what never changes. tables: the rotation (fragments, or signs), cells, bounds and levels."""
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
    """How a kind of request is compiled and launched, and the constant part of its arguments."""

    source: str
    kernel: str
    defines: Defines
    threads: int
    shared: int
    tiles_per_block: int
    resident: int  # blocks that run at a time; 0: unknown, or no block takes more than one tile for each warp
    args: ctypes.Structure  # StoreArgs
    tables: tuple[Tensor, ...]  # what args point to


def code_tables(
    fmt: TensorFormat, dim: int, unit: float, device: torch.device, error_steps: float = 1.0
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor]]:
    """The cells' width as a power of two and their zero; cells, bounds and levels.

    Behind cells of up to 4 bits are their levels times ``error_steps``, as floats. Behind those of up to
    ``RECORD_BITS`` is what each of them says.
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
    """The ``CellRecord`` (store/round.cuh) of every cell: uint8. ``below``: how many boundaries lie below each cell."""
    half, top = 1 << (book.bits - 1), (1 << book.bits) - 1
    index = np.stack([below, np.minimum(below.astype(np.int32) + 1, top)]).astype(np.int32)
    codes = np.where(index >= half, index, half - 1 - index)
    levels = (error_steps * book.levels_by_code).astype(np.float32)[codes]
    bounds = np.append(book.boundaries, np.inf).astype(np.float32)[below]
    records = np.stack([bounds.view(np.uint32), *levels.view(np.uint32), (codes[0] | codes[1] << 16).astype(np.uint32)])
    return np.ascontiguousarray(records.T).view(np.uint8).reshape(-1)


def cells(book: Codebook, largest: float) -> tuple[int, int, np.ndarray]:
    """The number line in cells of 2^-shift, each with its upper edge: shift, the cell of 0, and what is in each, uint8.

    Up to 4 bits the boundaries are edges, and a cell has a code; else it has the number of boundaries below it, and at
    most one inside.
    """
    bounds = book.boundaries
    for shift in range(8):
        scaled = bounds * 2**shift
        if np.all(scaled == np.floor(scaled)) if book.bits <= 4 else np.all(np.diff(np.ceil(scaled)) > 0):
            break
    else:
        raise AssertionError(f"boundaries of {book.bits} bits for {book.dim} dimensions do not fit any cells")
    # A norm of short integers may be 3.2% too small; 8 cells cover what 3% do not.
    zero = math.ceil(largest * 2**shift * 1.03) + 8
    zero += -zero % 8
    upper = np.arange(2 * zero) - zero
    below = (scaled[None, :] < upper[:, None]).sum(1) if book.bits <= 4 else (scaled <= upper[:, None] - 1).sum(1)
    half = 1 << (book.bits - 1)
    if book.bits <= 4:
        below = np.where(below >= half, below, half - 1 - below)
    return shift, zero, below.astype(np.uint8)
