"""store in CUDA C++, a warp per vector: latents, large head sizes, fp8 and raw sides."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.rotation import block_size, core_size, core_words, sign_words
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, RAW_NUMBER
from slimkv.ops.cuda.device import device_of
from slimkv.ops.cuda.module import Defines
from slimkv.ops.cuda.token_args import Vectors, point_to_tokens, vectors_of
from slimkv.ops.store.api import StoreRequest, refuses_raw_dtype
from slimkv.ops.store.cuda.args import Plan, StoreArgs, code_tables, point_side
from slimkv.spec import Kind, LatentSpec, PageLayout, SideLayout

SOURCE, KERNEL = "vectors/store.cu", "store_vectors"
LARGEST_DIM, LARGEST_TILE_DIM = 512, 256  # for this kernel, for the one with 16 tokens per warp
_WARPS, _BLOCKS = 4, 4  # warps of a thread block, thread blocks of a multiprocessor


def refusal(request: StoreRequest) -> str | None:
    """Why this kernel does not support the request, or None (Lloyd-Max and fp8 up to 512, raw; nearest rounding)."""
    if request.query_aware is not None:
        return "for fp8, raw sides and head sizes beyond 256 it has no query-aware rounding; use backend='triton'"
    return refuses_raw_dtype(request) or format_refusal(request.layout)


@cache
def format_refusal(layout: PageLayout) -> str | None:
    """Why pages of this layout are not supported, or None."""
    spec = layout.spec
    small = max(spec.key_dim, spec.value_dim) <= LARGEST_TILE_DIM and Kind.FP8 not in (spec.key.kind, spec.value.kind)
    if small and not isinstance(spec, LatentSpec):
        return f"it is for latents, fp8 and head sizes above {LARGEST_TILE_DIM}; use backend='triton'"
    for side in (layout.key, layout.value):
        kind, dim = side.format.kind, side.dim
        if kind == Kind.RAW:
            continue
        if dim > LARGEST_DIM:
            return f"it supports head sizes up to {LARGEST_DIM}, not {dim}; use backend='triton'"
        core = core_size(dim)
        if kind == Kind.LLOYD and (dim % 32 or block_size(dim) != dim or core > 32 or (core > 1 and dim // core > 32)):
            return f"its rotation does not support a head size of {dim}; use backend='triton'"
    return None


def prepare(request: StoreRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    key, value, pages, slots = request.key, request.value, request.pages, request.slot_mapping
    plan = _plan(request.layout, pages.device, vectors_of(key), vectors_of(value), slots.dtype == torch.int64)
    args = StoreArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, key, value, pages, slots)
    # Each side has enough thread blocks to fill the device, because the shorter side ends soon.
    heads, resident = pages.shape[1], _BLOCKS * device_of(pages.device).multiprocessors
    return plan, (min(-(-slots.shape[0] // _WARPS), max(1, resident // heads)), 2 * heads), args


@cache  # keeps the tables alive, to which captured graphs point
def _plan(layout: PageLayout, device: torch.device, key: Vectors, value: Vectors, long_slots: bool) -> Plan:
    codec, args, shared = Codec(layout.spec), StoreArgs(), 0
    tables: list[Tensor] = []
    defines = Defines({
        "BLOCK_SIZE": layout.block_size, "LONG_SLOTS": int(long_slots), "WARPS": _WARPS, "MIN_BLOCKS": _BLOCKS,
        "ROW_STRIDE": layout.key.row_stride,
    })  # fmt: skip
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        kind = side.format.kind
        cell_shift, cell_zero, tensors = code_tables(side.format, side.dim, constants.unit, device)
        numbers = {
            "D": side.dim, "CORE": core_size(side.dim), "KIND": KIND_NUMBERS.get(kind, RAW_NUMBER),
            "BITS": side.format.bits, "CODES": side.codes_offset, "FIELDS": side.fields_offset,
            "DTYPE": DTYPE_NUMBERS[dtype], "CELL_SHIFT": cell_shift, "CELL_ZERO": cell_zero,
            "VECTORS": int(aligned or kind == Kind.RAW),  # raw sides are copied number by number
        }  # fmt: skip
        defines |= {f"{prefix}_{name}": number for name, number in numbers.items()}
        rotation, bounds = _rotation_signs(side, layout.spec.seed, device), tensors[1]
        point_side(side_args, side, constants, (rotation, *tensors))
        tables += [rotation, *tensors]
        used = -(-(2 * cell_zero + 8 * len(bounds)) // 16) * 16
        shared = max(shared, used + _WARPS * _vector_bytes(side))
    return Plan(SOURCE, KERNEL, defines, 32 * _WARPS, shared, 0, 0, args, tuple(tables))


def _rotation_signs(side: SideLayout, seed: int, device: torch.device) -> Tensor:
    """The signs of the rotation as uint8: eight dimensions per byte, then a word per column of the core.

    Empty without rotation.
    """
    if side.format.kind != Kind.LLOYD:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    words = np.array(sign_words(side.dim, seed) + core_words(side.dim, columns=True), np.uint32)
    return torch.from_numpy(words.view(np.uint8)).to(device)


def _vector_bytes(side: SideLayout) -> int:
    """``VECTOR_BYTES`` of layout.cuh: shared memory per warp."""
    if side.format.kind == Kind.RAW:
        return 0
    numbers = 4 * (side.dim + -(-side.dim // 32) * 2) if side.format.kind == Kind.LLOYD else 0
    codes = -(-(side.dim + side.dim // 128 * 8) // 16) * 16
    return -(-(numbers + codes) // 16) * 16
