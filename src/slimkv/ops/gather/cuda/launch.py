"""gather in CUDA C++, a warp per vector: latents, and K and V of large head sizes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.codebook import LEVEL_DENOMINATOR
from slimkv.ops.cuda.constants import DTYPE_NUMBERS
from slimkv.ops.cuda.module import Defines, load
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
from slimkv.ops.gather.api import GatherRequest
from slimkv.ops.structures import declared
from slimkv.spec import Kind, PageLayout

SOURCE, KERNEL = "vectors/gather.cu", "gather_vectors"
_BLOCKS = 6  # of a multiprocessor


(GatherSide,) = declared("slimkv.ops.cuda", "vectors/decode.cuh", "GatherSide")
(GatherArgs,) = declared("slimkv.ops.cuda", "vectors/gather.cu", "GatherArgs", known=(GatherSide,))


@dataclass(frozen=True)
class Plan:
    """How a kind of request is compiled and launched, and the constant part of its arguments."""

    defines: Defines
    shared: int
    resident: int  # blocks that run at a time
    args: ctypes.Structure  # GatherArgs
    tables: tuple[Tensor, ...]  # what args point to


def supports(request: GatherRequest) -> str | None:
    """Lloyd-Max, fp8 and raw sides of latents, and of K and V of head sizes from 257 to 512."""
    if request.layout.plain_rows:
        return "it reads tiles of 16 tokens, not plain rows (blocks of 1 token, token rows), which the reference takes"
    return format_refusal(request.layout)


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather_kv``: one launch."""
    if request.slots.shape[0] == 0:
        return
    plan, blocks, args = prepare(request)
    kernel = load(SOURCE, plan.defines, request.pages.device).kernel(KERNEL)
    kernel.launch(blocks, 32 * WARPS, plan.shared, args, request.pages.device, overlap=True)


def prepare(request: GatherRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    pages, slots = request.pages, request.slots
    plan = _plan(
        request.layout, pages.device, _output(request.key), _output(request.value), slots.dtype == torch.int64,
        request.rotated,
    )  # fmt: skip
    args = GatherArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, place(request.key), place(request.value), pages, slots)
    return plan, grid(slots.shape[0], pages.shape[1], plan.resident), args


def _output(x: Tensor) -> tuple[torch.dtype, bool]:
    """Its dtype, and whether every row starts at a multiple of 16 bytes."""
    return x.dtype, in_vectors(place(x))


@cache  # captured graphs point to the tables: they stay
def _plan(
    layout: PageLayout,
    device: torch.device,
    key: tuple[torch.dtype, bool],
    value: tuple[torch.dtype, bool],
    long_slots: bool,
    rotated: bool,
) -> Plan:
    codec, args, shared = Codec(layout.spec), GatherArgs(), 0
    tables: list[Tensor] = []
    defines = common_defines(layout, long_slots, _BLOCKS)
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        lloyd, raw = side.format.kind == Kind.LLOYD, side.format.kind == Kind.RAW
        own = {
            "UNROTATE": int(lloyd and not rotated),
            "RAW_DTYPE": DTYPE_NUMBERS[getattr(torch, side.format.raw_dtype)] if raw else 0,
            "VECTORS": int(aligned),
        }
        defines |= side_defines(prefix, side, dtype, own)
        levels = torch.round(constants.levels * LEVEL_DENOMINATOR).to(torch.int32).to(device)
        signs = rotation_signs(side, layout.spec.seed, device, inverse=True)
        side_args.signs, side_args.levels = signs.data_ptr(), levels.data_ptr()
        side_args.unit = (1.0 if rotated else constants.orthonormal) / LEVEL_DENOMINATOR
        tables += [signs, levels]
        of_warp = side.dim * side.format.bits // 8 if raw else vector_bytes(side)
        shared = max(shared, -(-4 * len(levels) // 16) * 16 + WARPS * of_warp)
    return Plan(defines, shared, resident_blocks(device, _BLOCKS), args, tuple(tables))
