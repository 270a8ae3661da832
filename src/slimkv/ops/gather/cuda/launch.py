"""gather in CUDA C++, a warp per vector: latents, and K and V of large head sizes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.codebook import LEVEL_DENOMINATOR
from slimkv.ops.cuda import vectors
from slimkv.ops.cuda.constants import DTYPE_NUMBERS
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.cuda.places import Vectors, point_to_tokens, vectors_of
from slimkv.ops.gather.api import GatherRequest
from slimkv.ops.structures import declared
from slimkv.spec import Kind, PageLayout

SOURCE, KERNEL = "vectors/gather.cu", "gather_vectors"
_BLOCKS = 6  # of a multiprocessor

(GatherSide,) = declared("slimkv.ops.cuda", "vectors/decode.cuh", "GatherSide")
(GatherArgs,) = declared("slimkv.ops.cuda", "vectors/gather.cu", "GatherArgs", known=(GatherSide,))


class Plan(NamedTuple):
    """How a kind of request is compiled and launched, and the constant part of its arguments."""

    defines: Defines
    shared: int
    args: ctypes.Structure  # GatherArgs
    tables: tuple[Tensor, ...]  # what args point to


def supports(request: GatherRequest) -> str | None:
    """Lloyd-Max, fp8 and raw sides of latents, and of K and V of head sizes from 257 to 512."""
    if request.layout.plain_rows:
        return "it reads tiles of 16 tokens, not plain rows (blocks of 1 token, token rows), which the reference takes"
    return vectors.format_refusal(request.layout)


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather_kv``: one launch."""
    if request.slots.shape[0] == 0:
        return
    plan, blocks, args = prepare(request)
    kernel = load(SOURCE, plan.defines, request.pages.device).kernel(KERNEL)
    kernel.launch(blocks, 32 * vectors.WARPS, plan.shared, args, request.pages.device, overlap=True)


def prepare(request: GatherRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    key, value, pages, slots = request.key, request.value, request.pages, request.slots
    long_slots = slots.dtype == torch.int64
    plan = _plan(request.layout, pages.device, vectors_of(key), vectors_of(value), long_slots, request.rotated)
    args = GatherArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, key, value, pages, slots)
    return plan, vectors.grid(slots.shape[0], pages.shape[1], pages.device, _BLOCKS), args


@cache  # captured graphs point to the tables: they stay
def _plan(
    layout: PageLayout, device: torch.device, key: Vectors, value: Vectors, long_slots: bool, rotated: bool
) -> Plan:
    codec, args, shared = Codec(layout.spec), GatherArgs(), 0
    tables: list[Tensor] = []
    defines = vectors.common_defines(layout, long_slots, _BLOCKS)
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        lloyd, raw = side.format.kind == Kind.LLOYD, side.format.kind == Kind.RAW
        defines |= vectors.side_defines(
            prefix, side, dtype, UNROTATE=int(lloyd and not rotated), VECTORS=int(aligned),
            RAW_DTYPE=DTYPE_NUMBERS[getattr(torch, side.format.raw_dtype)] if raw else 0,
        )  # fmt: skip
        levels = torch.round(constants.levels * LEVEL_DENOMINATOR).to(torch.int32).to(device)
        signs = vectors.rotation_signs(side, layout.spec.seed, device, inverse=True)
        side_args.signs, side_args.levels = signs.data_ptr(), levels.data_ptr()
        side_args.unit = (1.0 if rotated else constants.orthonormal) / LEVEL_DENOMINATOR
        tables += [signs, levels]
        of_warp = side.dim * side.format.bits // 8 if raw else vectors.vector_bytes(side)
        shared = max(shared, -(-4 * len(levels) // 16) * 16 + vectors.WARPS * of_warp)
    return Plan(defines, shared, args, tuple(tables))
