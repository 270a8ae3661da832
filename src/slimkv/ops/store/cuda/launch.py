"""store in CUDA C++: one launch, a warp (or, for few tokens, several) per tile of 16 tokens of a head's K or V."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.quantize import becomes_short
from slimkv.codec.rotation import signed_hadamard
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS
from slimkv.ops.cuda.device import device_of
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.cuda.token_args import Vectors, point_to_tokens, vectors_of
from slimkv.ops.store.api import StoreRequest, refuses_policy
from slimkv.ops.store.cuda import vectors
from slimkv.ops.store.cuda.args import RECORD_BITS, Plan, StoreArgs, code_tables, point_side
from slimkv.spec import SLICE_DIMS, TILE_TOKENS, Kind, PageLayout, SideLayout, TensorFormat

SOURCE, KERNEL = "store/store.cu", "store"
LARGEST_DIM = 256
FEW_VECTORS = 8192  # tokens times heads: below this, several warps share a tile
_WARPS, _QUERY_AWARE_WARPS = 4, 2  # query-aware rounding needs shared memory; small GPUs have 99 KiB
_MATRIX_WARPS, _MATRIX_ROOM = 4, 228 << 10  # warps that share a head's matrix, if two such blocks fit
# Rotation: matrix products of few dimensions at a time, combined by additions.
_GROUP_DIMS, _MOST_GROUPS = 32, 4
_SIGNS = {torch.bfloat16: 0x5F80, torch.float16: 0x0001}  # 2^64 and 2^-24, which represent 1 (store/integers.cuh)


def supports(request: StoreRequest) -> str | None:
    """None for Lloyd-Max codes at head sizes up to 256 and for what ``vectors`` supports; else the reason."""
    layout = request.layout
    if layout.block_size == 1:
        return "it needs blocks of at least 16 tokens; blocks of 1 token (plain rows) need backend='reference'"
    return refuses_policy(layout) or format_refusal(layout) or (None if in_tiles(layout) else vectors.refusal(request))


@cache
def format_refusal(layout: PageLayout) -> str | None:
    """Why pages of this layout are not supported, or None."""
    for side in (layout.key, layout.value):
        if side.format.kind == Kind.UNIFORM:
            return f"it stores Lloyd-Max codes and fp8, not {side.format.name}; triton stores uniform codes"
    return None


@cache
def in_tiles(layout: PageLayout) -> bool:
    """Whether warps process tiles of 16 tokens rather than single vectors."""
    return not layout.token_rows and all(
        side.format.kind == Kind.LLOYD and side.dim <= LARGEST_DIM for side in (layout.key, layout.value)
    )


def fuses_offset(request: StoreRequest) -> bool:
    """Whether the kernel itself subtracts the key offset."""
    return in_tiles(request.layout)


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store_kv``: one launch."""
    if request.slot_mapping.shape[0] == 0:
        return
    plan, grid, args = prepare(request)
    kernel = load(plan.source, plan.defines, request.pages.device).kernel(plan.kernel)
    kernel.launch(grid, plan.threads, plan.shared, args, request.pages.device, overlap=True)


def plan(request: StoreRequest) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], None] | None:
    """A function that stores other K, V and slots with the same shapes, strides, dtypes and alignment."""
    if request.slot_mapping.shape[0] == 0:
        return None
    plan, grid, args = prepare(request)
    device = request.pages.device
    kernel = load(plan.source, plan.defines, device).kernel(plan.kernel)
    launch = kernel.bound(grid, plan.threads, plan.shared, args, device, overlap=True)
    keys, values, several = args.key, args.value, request.matrices > 1

    def run(key: Tensor, value: Tensor, slots: Tensor, index: Tensor | None) -> None:
        keys.x, values.x, args.slots = key.data_ptr(), value.data_ptr(), slots.data_ptr()
        if several and index is not None:
            args.query_aware_index = index.data_ptr()
        launch()

    return run


def prepare(request: StoreRequest) -> tuple[Plan, tuple[int, int], ctypes.Structure]:
    """The plan of a request, its grid, and its arguments."""
    if not in_tiles(request.layout):
        return vectors.prepare(request)
    key, value, pages, slots = request.key, request.value, request.pages, request.slot_mapping
    tokens, heads, matrices = slots.shape[0], pages.shape[1], request.query_aware
    few, indexed = tokens * heads < FEW_VECTORS, request.query_aware_index is not None and request.matrices > 1
    query_aware = 0 if matrices is None else 2 if indexed else 1
    plan = _plan(
        request.layout, pages.device, vectors_of(key), vectors_of(value), slots.dtype == torch.int64, few, query_aware
    )
    args = StoreArgs.from_buffer_copy(plan.args)
    point_to_tokens(args, key, value, pages, slots)
    args.key.offset = None if request.key_offset is None else request.key_offset.data_ptr()
    if matrices is not None:
        args.query_aware, args.matrices = matrices.data_ptr(), 1
        if request.query_aware_index is not None and indexed:
            args.query_aware_index, args.matrices = request.query_aware_index.data_ptr(), request.matrices
            args.matrix_stride, args.heads, args.spread = matrices[0].numel(), heads, int(few)
    blocks = -(-tokens // (TILE_TOKENS * plan.tiles_per_block))
    if matrices is not None:
        # Neighbouring tokens share a matrix in a prefill chunk, but not in a decode step: each matrix has its blocks.
        return plan, (blocks, heads * (args.matrices if args.spread else 1)), args
    if plan.resident:  # one wave of blocks; the warps' tile counts differ by at most one
        blocks = min(blocks, max(1, plan.resident // (2 * heads)))
    return plan, (blocks, 2 * heads), args


@cache  # keeps the tables alive, to which captured graphs point
def _plan(
    layout: PageLayout, device: torch.device, key: Vectors, value: Vectors, long_slots: bool, few: bool,
    query_aware: int,
) -> Plan:  # fmt: skip
    """The plan. ``query_aware``: 0 no, 1 with one matrix per head, 2 with several."""
    codec = Codec(layout.spec)
    args = StoreArgs(error_steps=codec.key_tables.error_steps)
    defines = Defines({"BLOCK_SIZE": layout.block_size, "LONG_SLOTS": int(long_slots)})
    room = device_of(device).shared_of_multiprocessor >= _MATRIX_ROOM
    shared_matrix = query_aware == 1 and not few and layout.spec.key_dim <= 128 and room
    warps = 1 if few or (query_aware and layout.spec.key_dim > 192) else _QUERY_AWARE_WARPS if query_aware else _WARPS
    rounding_warps = warps = _MATRIX_WARPS if shared_matrix else warps  # as many further warps store values
    tables: list[Tensor] = []
    shared, together = 0, few and not query_aware
    # Whether the matrix is in shared memory. Beyond head size 192, small GPUs have no room for it.
    shared_weights = shared_matrix or (bool(query_aware) and few and layout.spec.key_dim <= 192)
    cell_records = shared_weights and few and 4 < layout.spec.key.bits <= RECORD_BITS
    sides = (
        ("K", layout.key, key, codec.key_tables, args.key),
        ("V", layout.value, value, codec.value_tables, args.value),
    )
    for prefix, side, (dtype, aligned), constants, side_args in sides:
        groups = 1 if together else _groups(side.dim, layout.spec.seed)
        per = _slices_per_warp(side) if together else side.dim // SLICE_DIMS // groups
        split = side.dim // SLICE_DIMS // groups // per
        cell_shift, cell_zero, tensors = _tables(
            side.format, side.dim, side.transposed, layout.spec.seed, groups,
            (constants.unit, constants.error_steps), device, dtype,
        )  # fmt: skip
        own = {
            "D": side.dim, "GROUPS": groups, "PER": per, "KIND": KIND_NUMBERS[side.format.kind],
            "BITS": side.format.bits, "CODES": side.codes_offset, "FIELDS": side.fields_offset,
            "DTYPE": DTYPE_NUMBERS[dtype], "VECTORS": int(aligned), "CELL_SHIFT": cell_shift, "CELL_ZERO": cell_zero,
        }  # fmt: skip
        defines |= {f"{prefix}_{name}": number for name, number in own.items()}
        point_side(side_args, side, constants, tensors)
        used = 2 * cell_zero + 8 * len(tensors[2])
        if query_aware and prefix == "K":
            by_cell = 2 * cell_zero * (16 if cell_records else 4)
            used += by_cell if side.format.bits <= 4 or cell_records else 4 << side.format.bits
            used = -(-used // 16) * 16
            used += rounding_warps * (128 * (side.dim + 4) + 5120)  # QueryAwareMemory::BYTES of store/round.cuh
            used += side.dim * (side.dim + 16) if shared_weights else 0
        if together and _by_slices(side):  # SharedDigits::BYTES, and words of two planes that warps assemble together
            used += 3 * TILE_TOKENS * (side.dim + 32) + 128 + 256 * side.dim // SLICE_DIMS + 16
        rows = groups * -(-side.dim // groups // 32) * 64 * 8 * dtype.itemsize  # RowBuffer::BYTES
        used += 8 * TILE_TOKENS * split if together or query_aware else 15 + warps * rows
        shared = shared + used if query_aware else max(shared, used)
        warps = 2 * rounding_warps if query_aware else max(warps, split)
        tables += tensors
    tiles_per_block = 1 if together else warps
    lean = max(layout.spec.key_dim, layout.spec.value_dim) <= 128
    blocks = 16 // warps if query_aware and lean and not few else 4 if lean else 2
    if together and lean and warps > 4 and not all(_by_slices(side) for _, side, *_ in sides):
        blocks = 2  # the other side needs more registers
    defines |= {
        "WARPS": warps, "TILES_PER_BLOCK": tiles_per_block, "MIN_BLOCKS": blocks, "QUERY_AWARE": int(query_aware),
        "SHARED_WEIGHTS": int(shared_weights), "CELL_RECORDS": int(cell_records),
    }  # fmt: skip
    resident = blocks * device_of(device).multiprocessors if lean and tiles_per_block > 1 else 0
    return Plan(SOURCE, KERNEL, defines, 32 * warps, shared, tiles_per_block, resident, args, tuple(tables))


def _groups(dim: int, seed: int) -> int:
    """The number of groups that share one smaller rotation and are then combined by Hadamard butterflies."""
    matrix, groups = signed_hadamard(dim, seed), 1
    while dim // groups > _GROUP_DIMS and groups < _MOST_GROUPS and dim // groups % (2 * SLICE_DIMS) == 0:
        inner = dim // groups // 2
        blocks = matrix.reshape(2 * groups, inner, 2 * groups, inner)
        if not all(
            np.array_equal(blocks[q, :, p], blocks[q, :, 0] * (-1) ** (q & p).bit_count())
            for q in range(2 * groups)
            for p in range(2 * groups)
        ):
            break
        groups *= 2
    return groups


def _slices_of_word(side: SideLayout) -> int:
    """The maximum number of slices that share a word of a plane."""
    return max([4 // plane.bits for plane in side.planes if plane.bits <= 4], default=1)


def _by_slices(side: SideLayout) -> bool:
    """Whether, for few tokens, each slice has its own warp: ``ONE_SLICE`` of store/format.cuh."""
    slices = side.dim // SLICE_DIMS
    whole_words = slices % _slices_of_word(side) == 0
    return side.format.bits > 4 and slices in (2, 4, 8) and whole_words


def _slices_per_warp(side: SideLayout) -> int:
    """Slices per warp, so that up to four warps with whole words of every plane, or one per slice, share a tile."""
    slices, share = side.dim // SLICE_DIMS, _slices_of_word(side)
    if _by_slices(side):
        return 1
    return next((n for n in range(share, slices, share) if slices % n == 0 and slices // n <= 4), slices)


@cache  # keeps the tables alive, to which captured graphs point
def _tables(
    fmt: TensorFormat, dim: int, transposed: bool, seed: int, groups: int, units: tuple[float, float],
    device: torch.device, dtype: torch.dtype,
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The shift and zero of ``cells``; fragments, cells, bounds and levels.

    ``units``: ``unit`` and ``error_steps`` of ``SideTables``.
    """
    short = dtype if becomes_short(fmt, dtype, dim) else None
    fragments = torch.from_numpy(_fragments(signed_hadamard(dim, seed), groups, transposed, short)).to(device)
    shift, zero, tensors = code_tables(fmt, dim, units[0], device, units[1])
    return shift, zero, (fragments, *tensors)


def _fragments(matrix: np.ndarray, groups: int, transposed: bool, short: torch.dtype | None) -> np.ndarray:
    """The rotation in fragment order: uint8.

    [groups, slices, steps, 32 lanes, 4 words] of 4 bytes, first the matrix, then 64 times the matrix. A step has 32
    dimensions: lane 4 g + t holds the vector's dimensions 8 t .. 8 t + 7 for columns g and g + 8 of a slice. In a right
    operand, one column follows the other; in a left one (``transposed``), the first four dimensions of both columns
    precede the last four. Short integers are 16-bit floats: [groups, slices, steps, 2, 32 lanes, 4 words] of 2, first
    for the first and then for the last four dimensions, with ``_SIGNS`` for the signs.
    """
    dim = matrix.shape[0]
    inner = dim // groups
    steps = -(-inner // 32)
    lane, word, byte = np.ogrid[:32, :4, :4]
    last, right = (word // 2, word % 2) if transposed else (word % 2, word // 2)
    padded = np.zeros((groups, 32 * steps, inner), np.int8)
    padded[:, :inner] = matrix.reshape(groups, inner, dim)[:, :, :inner]
    column = np.arange(inner // 16)[:, None, None, None, None] * 16 + lane // 4 + 8 * right
    if short is not None:
        lane, word, half = np.ogrid[:32, :4, :2]
        eight = np.arange(2 * steps)[:, None, None, None]
        row = eight // 2 * 32 + 8 * (lane % 4) + 4 * (eight % 2) + 2 * last + half
        signs = np.array([0, _SIGNS[short], _SIGNS[short] | 0x8000], np.uint16)  # for entries 0, 1 and -1
        return np.ascontiguousarray(signs[padded[:, row, column]]).view(np.uint8).reshape(-1)
    row = np.arange(steps)[:, None, None, None] * 32 + 8 * (lane % 4) + 4 * last + byte
    ones = padded[:, row, column]
    return np.ascontiguousarray(np.stack([ones, ones * np.int8(64)])).view(np.uint8).reshape(-1)
