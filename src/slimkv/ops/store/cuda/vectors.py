"""store in CUDA C++, a warp per vector: latents, large head sizes and raw sides."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.rotation import core_size
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, POLICY_NUMBERS, RAW_NUMBER
from slimkv.ops.cuda.module import Defines
from slimkv.ops.cuda.places import in_vectors, place, point_to_tokens
from slimkv.ops.cuda.vectors import format_refusal, rotation_signs, vector_bytes
from slimkv.ops.store.api import StoreRequest
from slimkv.ops.store.cuda.args import Plan, StoreArgs, code_tables
from slimkv.spec import Kind, PageLayout

SOURCE, KERNEL = "vectors/store.cu", "store_vectors"
_WARPS, _BLOCKS = 4, 4  # of a block, and such blocks of a multiprocessor


def refusal(request: StoreRequest) -> str | None:
    """Why it does not take the request, or None: Lloyd-Max and fp8 of up to 512, and raw sides; nearest rounding."""
    if request.query_aware is not None:
        return "beside raw sides and beyond a head size of 256 it rounds to the nearest; triton is query-aware there"
    for side, x in ((request.layout.key, request.key), (request.layout.value, request.value)):
        if side.format.kind == Kind.RAW and str(x.dtype) != f"torch.{side.format.raw_dtype}":
            return f"the raw format holds {side.format.raw_dtype} bit for bit, but the input is {x.dtype}"
    return format_refusal(request.layout)


def prepare(request: StoreRequest) -> tuple[Plan, tuple[int, int], StoreArgs]:
    """The plan of a request, its grid, and its arguments."""
    key, value, pages, slots = request.key, request.value, request.pages, request.slot_mapping
    tokens, heads = slots.shape[0], pages.shape[1]
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
    # Of either side as many as run at a time: the shorter one soon makes room.
    blocks = min(-(-tokens // _WARPS), max(1, plan.resident // heads))
    return plan, (blocks, 2 * heads), args


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
    defines = Defines({"BLOCK_SIZE": layout.block_size, "LONG_SLOTS": int(long_slots)})
    defines |= {"WARPS": _WARPS, "MIN_BLOCKS": _BLOCKS}
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        cell_shift, cell_zero, tensors = code_tables(side.format, side.dim, constants.unit, device)
        own = {
            "D": side.dim,
            "CORE": core_size(side.dim),
            "KIND": KIND_NUMBERS.get(side.format.kind, RAW_NUMBER),
            "BITS": side.format.bits,
            "POLICY": POLICY_NUMBERS[side.format.policy],
            "CODES": side.codes_offset,
            "FIELDS": side.fields_offset,
            "DTYPE": DTYPE_NUMBERS[dtype],
            "VECTORS": int(aligned or side.format.kind == Kind.RAW),  # raw sides are copied number by number
            "CELL_SHIFT": cell_shift,
            "CELL_ZERO": cell_zero,
        }
        defines |= {f"{prefix}_{name}": number for name, number in own.items()}
        rotation, (cells, bounds, _) = rotation_signs(side, layout.spec.seed, device), tensors
        side_args.point_to(side, constants, (rotation, *tensors))
        tables += [rotation, *tensors]
        used = -(-(len(cells) + 8 * len(bounds)) // 16) * 16
        shared = max(shared, used + _WARPS * vector_bytes(side))
    resident = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Plan(SOURCE, KERNEL, defines, 32 * _WARPS, shared, 0, resident * _BLOCKS, args, tuple(tables))
