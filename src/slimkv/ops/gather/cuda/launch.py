"""gather in CUDA C++, a warp per vector: latents, and K and V of large head sizes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.codebook import LEVEL_DENOMINATOR
from slimkv.codec.rotation import core_size
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, RAW_NUMBER
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.cuda.places import in_vectors, place, point_to_tokens
from slimkv.ops.cuda.vectors import format_refusal, rotation_signs, vector_bytes
from slimkv.ops.gather.api import GatherRequest
from slimkv.spec import Kind, PageLayout

SOURCE, KERNEL = "vectors/gather.cu", "gather_vectors"
_WARPS, _BLOCKS = 4, 6  # of a block, and such blocks of a multiprocessor


class GatherSide(ctypes.Structure):
    """``GatherSide`` of vectors/decode.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("signs", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("unit", ctypes.c_float),
    ]


class GatherArgs(ctypes.Structure):
    """``GatherArgs`` of vectors/gather.cu."""

    _fields_ = [
        ("key", GatherSide),
        ("value", GatherSide),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("page_head_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Plan:
    """How a kind of request is compiled and launched, and the constant part of its arguments."""

    defines: Defines
    shared: int
    resident: int  # blocks that run at a time
    args: GatherArgs
    tables: tuple[Tensor, ...]  # what args point to


def supports(request: GatherRequest) -> str | None:
    """Lloyd-Max, fp8 and raw sides of latents, and of K and V of head sizes from 257 to 512."""
    if request.layout.block_size == 1:
        return "blocks of 1 token are plain rows, which the reference takes; kernels take blocks of 16 tokens and more"
    return format_refusal(request.layout)


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather_kv``: one launch."""
    if request.slots.shape[0] == 0:
        return
    plan, grid, args = prepare(request)
    kernel = load(SOURCE, plan.defines, request.pages.device).kernel(KERNEL)
    kernel.launch(grid, 32 * _WARPS, plan.shared, args, request.pages.device, overlap=True)


def prepare(request: GatherRequest) -> tuple[Plan, tuple[int, int], GatherArgs]:
    """The plan of a request, its grid, and its arguments."""
    pages, slots = request.pages, request.slots
    tokens, heads = slots.shape[0], pages.shape[1]
    plan = _plan(
        request.layout, pages.device, _output(request.key), _output(request.value), slots.dtype == torch.int64,
        request.rotated,
    )  # fmt: skip
    args = GatherArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, place(request.key), place(request.value), pages, slots)
    blocks = min(-(-tokens // _WARPS), max(1, plan.resident // heads))
    return plan, (blocks, 2 * heads), args


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
    defines = Defines({"BLOCK_SIZE": layout.block_size, "LONG_SLOTS": int(long_slots)})
    defines |= {"WARPS": _WARPS, "MIN_BLOCKS": _BLOCKS}
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        lloyd, raw = side.format.kind == Kind.LLOYD, side.format.kind == Kind.RAW
        own = {
            "D": side.dim,
            "CORE": core_size(side.dim),
            "UNROTATE": int(lloyd and not rotated),
            "KIND": KIND_NUMBERS.get(side.format.kind, RAW_NUMBER),
            "BITS": side.format.bits,
            "CODES": side.codes_offset,
            "FIELDS": side.fields_offset,
            "RAW_DTYPE": DTYPE_NUMBERS[getattr(torch, side.format.raw_dtype)] if raw else 0,
            "DTYPE": DTYPE_NUMBERS[dtype],
            "VECTORS": int(aligned),
        }
        defines |= {f"{prefix}_{name}": number for name, number in own.items()}
        levels = torch.round(constants.levels * LEVEL_DENOMINATOR).to(torch.int32).to(device)
        signs = rotation_signs(side, layout.spec.seed, device, inverse=True)
        side_args.signs, side_args.levels = signs.data_ptr(), levels.data_ptr()
        side_args.unit = (1.0 if rotated else constants.orthonormal) / LEVEL_DENOMINATOR
        tables += [signs, levels]
        of_warp = side.dim * side.format.bits // 8 if raw else vector_bytes(side)
        shared = max(shared, -(-4 * len(levels) // 16) * 16 + _WARPS * of_warp)
    resident = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Plan(defines, shared, resident * _BLOCKS, args, tuple(tables))
