"""store in CUDA C++, a warp per vector: latents, large head sizes, fp8 and raw sides."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.cuda import vectors
from slimkv.ops.cuda.places import Vectors, point_to_tokens, vectors_of
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
    return refuses_raw_dtype(request) or vectors.format_refusal(request.layout, any_size=fp8)


def prepare(request: StoreRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    key, value, pages, slots = request.key, request.value, request.pages, request.slot_mapping
    plan = _plan(request.layout, pages.device, vectors_of(key), vectors_of(value), slots.dtype == torch.int64)
    args = StoreArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, key, value, pages, slots)
    return plan, vectors.grid(slots.shape[0], pages.shape[1], pages.device, _BLOCKS), args


@cache  # captured graphs point to the tables: they stay
def _plan(layout: PageLayout, device: torch.device, key: Vectors, value: Vectors, long_slots: bool) -> Plan:
    codec, args, shared = Codec(layout.spec), StoreArgs(), 0
    tables: list[Tensor] = []
    defines = vectors.common_defines(layout, long_slots, _BLOCKS)
    defines["ROW_STRIDE"] = layout.key.row_stride
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        cell_shift, cell_zero, tensors = code_tables(side.format, side.dim, constants.unit, device)
        defines |= vectors.side_defines(
            prefix, side, dtype, CELL_SHIFT=cell_shift, CELL_ZERO=cell_zero,
            VECTORS=int(aligned or side.format.kind == Kind.RAW),  # raw sides are copied number by number
        )  # fmt: skip
        rotation, bounds = vectors.rotation_signs(side, layout.spec.seed, device), tensors[1]
        point_side(side_args, side, constants, (rotation, *tensors))
        tables += [rotation, *tensors]
        used = -(-(2 * cell_zero + 8 * len(bounds)) // 16) * 16
        shared = max(shared, used + vectors.WARPS * vectors.vector_bytes(side))
    return Plan(SOURCE, KERNEL, defines, 32 * vectors.WARPS, shared, 0, 0, args, tuple(tables))
