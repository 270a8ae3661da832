"""store in CUDA C++, a warp per vector: latents, large head sizes, fp8 and raw sides."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.cuda.places import in_vectors, place, point_to_tokens
from slimkv.ops.cuda.vectors import (
    WARPS,
    common_defines,
    format_refusal,
    grid,
    resident_blocks,
    rotation_signs,
    side_defines,
    vector_bytes,
)
from slimkv.ops.store.api import StoreRequest
from slimkv.ops.store.cuda.args import Plan, StoreArgs, code_tables, point_side
from slimkv.ops.store.refusals import refuses_raw_dtype
from slimkv.spec import Kind, PageLayout

SOURCE, KERNEL = "vectors/store.cu", "store_vectors"
_BLOCKS = 4  # of a multiprocessor


def refusal(request: StoreRequest) -> str | None:
    """Why it does not take the request, or None: Lloyd-Max and fp8 of up to 512, and raw sides; nearest rounding."""
    if request.query_aware is not None:
        return "with fp8 or raw sides and beyond head sizes of 256 it rounds to the nearest; triton is query-aware"
    fp8 = Kind.FP8 in (request.layout.spec.key.kind, request.layout.spec.value.kind)
    return refuses_raw_dtype(request) or format_refusal(request.layout, any_size=fp8)


def prepare(request: StoreRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    key, value, pages, slots = request.key, request.value, request.pages, request.slot_mapping
    key_place, value_place = place(key), place(value)
    plan = _plan(
        request.layout,
        pages.device,
        (key.dtype, in_vectors(key_place)),
        (value.dtype, in_vectors(value_place)),
        slots.dtype == torch.int64,
    )
    args = StoreArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, key_place, value_place, pages, slots)
    return plan, grid(slots.shape[0], pages.shape[1], plan.resident), args


@cache  # captured graphs point to the tables: they stay
def _plan(
    layout: PageLayout,
    device: torch.device,
    key: tuple[torch.dtype, bool],
    value: tuple[torch.dtype, bool],
    long_slots: bool,
) -> Plan:
    codec, args, shared = Codec(layout.spec), StoreArgs(), 0
    tables: list[Tensor] = []
    defines = common_defines(layout, long_slots, _BLOCKS)
    defines |= {"ROW_STRIDE": layout.key.row_stride}
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        cell_shift, cell_zero, tensors = code_tables(side.format, side.dim, constants.unit, device)
        own = {
            "VECTORS": int(aligned or side.format.kind == Kind.RAW),  # raw sides are copied number by number
            "CELL_SHIFT": cell_shift,
            "CELL_ZERO": cell_zero,
        }
        defines |= side_defines(prefix, side, dtype, own)
        rotation, bounds = rotation_signs(side, layout.spec.seed, device), tensors[1]
        point_side(side_args, side, constants, (rotation, *tensors))
        tables += [rotation, *tensors]
        used = -(-(2 * cell_zero + 8 * len(bounds)) // 16) * 16
        shared = max(shared, used + WARPS * vector_bytes(side))
    resident = resident_blocks(device, _BLOCKS)
    return Plan(SOURCE, KERNEL, defines, 32 * WARPS, shared, 0, resident, args, tuple(tables))
