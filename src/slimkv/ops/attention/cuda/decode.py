"""attend with CUDA C++: sequences of few queries on their packed pages (source/decode/decode.cu).

Sequences of more queries than that (prefill) are unpacked and attended in the same call: on Hopper by ``prefill``
where it can, else by the Triton kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimkv.codec.codebook import codebook
from slimkv.codec.rotation import sign_words
from slimkv.errors import InputError
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, MIN_TRITON_HEAD_DIM, AttendRequest
from slimkv.ops.attention.cuda import prefill
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import Kind, PageLayout, SideLayout, TensorFormat

SOURCE = "decode/decode.cu"
LARGEST_DIM = 256
_MERGE_WARPS, _PARTS_AT_ONCE = 2, 4  # as merge.cuh has them


# (tiles, warps, stages, resident) from best to smallest, by columns. Warps come in fours: one for each scheduler.
_SMALLER = ((4, 4, 2, 1), (2, 4, 2, 2), (2, 4, 2, 1), (1, 4, 2, 1))
_LONG = {
    4: ((8, 12, 2, 1), (4, 12, 2, 1), (4, 8, 2, 1), (2, 8, 2, 2), *_SMALLER),
    8: ((4, 8, 2, 1), (4, 4, 2, 2), *_SMALLER),
    16: ((4, 8, 2, 1), (4, 4, 2, 2), *_SMALLER),
}
# Many short sequences: smaller blocks, of which one computes while another changes its sequence.
_SHORT = {4: ((4, 4, 2, 3), *_LONG[4]), 8: _LONG[8], 16: _LONG[16]}
_SHORT_BYTES = 3 << 19  # of the keys and values of one head
_LITTLE_TOKENS = 6 << 10  # of one head, a multiprocessor


class _Table(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint32), ("high", ctypes.c_uint32), ("signs", ctypes.c_uint32))


_SignBits = ctypes.c_uint32 * 8


class Args(ctypes.Structure):
    """The kernels' argument; decode.cu says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "pages", "table", "lengths", "starts", "key_signs", "value_signs", "key_levels", "value_levels",
            "sinks", "out", "lse", "parts", "part_states",
        )),
        *((name, ctypes.c_int64) for name in (
            "query_stride", "query_head_stride", "page_stride", "page_head_stride", "table_stride", "out_stride",
            "out_head_stride",
        )),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "key_norm", "value_norm")),
        ("key_table", _Table),
        ("value_table", _Table),
        ("key_sign_bits", _SignBits),
        ("value_sign_bits", _SignBits),
        *((name, ctypes.c_int32) for name in (
            "sequences", "heads", "group", "most_queries", "causal", "window", "blocks", "merge_split",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut: all of it known when it is compiled."""

    groups: int  # of columns; a column is a query head of one query
    wide: bool  # 8 columns a group instead of 4
    tiles: int  # 16-token tiles of a step
    warps: int
    stages: int  # steps of a warp in shared memory at a time
    resident: int  # blocks of a multiprocessor

    @property
    def columns(self) -> int:
        """Rows of output that one block computes at a time."""
        return (8 if self.wide else 4) * self.groups


@dataclass(frozen=True)
class Device:
    """What the shape depends on."""

    multiprocessors: int
    shared_of_multiprocessor: int
    shared_of_block: int


KernelCall = tuple[str, Defines, tuple[int, int], int, int, Args, bool]
Launcher = Callable[[str, Defines, tuple[int, int], int, int, Args, bool], None]
Binder = Callable[[str, Defines, tuple[int, int], int, int, Args, bool], Callable[[], None]]


@dataclass(frozen=True)
class Plan:
    """How a kind of request is compiled and launched, and the constant part of its arguments."""

    shape: Shape
    defines: Defines
    shared: int
    args: Args


def supports(request: AttendRequest) -> str | None:
    """Lloyd-Max, uniform and fp8 codes, head sizes up to 256, and as many query heads as fit the columns."""
    if request.fresh is not None:
        return "it attends codes only, not fresh K and V; use backend='triton'"
    if request.num_splits is not None:
        return f"it partitions keys itself, not as num_splits={request.num_splits} asks; leave num_splits at None"
    spec = request.layout.spec
    if request.max_query_len > MAX_DECODE_QUERIES and min(spec.key_dim, spec.value_dim) < MIN_TRITON_HEAD_DIM:
        return (
            f"prefill at head sizes {spec.key_dim}/{spec.value_dim} is beyond the Triton kernels; "
            "use backend='reference'"
        )
    refusal = _refusal(request.layout, request.group)
    if refusal is None and request.pages.device.type == "cuda" and _shape(request) is None:
        return f"{request.layout.spec.format} needs more shared memory than this device has; use backend='triton'"
    return refusal


@lru_cache(maxsize=1024)
def _refusal(layout: PageLayout, group: int) -> str | None:
    spec = layout.spec
    for name, side, dim in (("key", spec.key, spec.key_dim), ("value", spec.value, spec.value_dim)):
        if side.kind not in KIND_NUMBERS:
            return (
                f"{name} format {side.name} is not one of its formats (1-8, u2-u8, ur2-ur8, fp8); use backend='triton'"
            )
        if dim > LARGEST_DIM:
            return f"{name} head size {dim} is beyond {LARGEST_DIM}; use backend='triton'"
    if layout.block_size < 16:
        return "it reads blocks of 16 tokens and more; use backend='reference'"
    if group > _most_columns(layout):
        return (
            f"{group} query heads per KV head are more than {_most_columns(layout)}, "
            f"what fits its registers at head sizes {spec.key_dim}/{spec.value_dim}; use backend='triton'"
        )
    return None


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    if request.query.shape[0] == 0 or request.max_query_len == 0:
        return
    attend_packed(request, device_of(request.query.device), _launcher(request.query.device))
    if request.max_query_len > MAX_DECODE_QUERIES:
        if prefill.runs_on(request.query.device) and prefill.refusal(request) is None:
            prefill.attend_prefill(request, prefill.launcher(request.query.device))
            return
        from slimkv.ops.attention.triton.launch import attend_prefill

        attend_prefill(request)


def plan(request: AttendRequest) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """A call (query, out, seq_lens) with everything else as it is here, and lengths up to ``max_seq_len``."""
    if request.query.shape[0] == 0 or not 0 < request.max_query_len <= MAX_DECODE_QUERIES:
        return None
    device = request.query.device
    call = _prepare(request, device_of(device))
    args, (start, merge), needed = call.args, call.bound(_binder(device)), call.workspace_bytes

    def run(query: Tensor, out: Tensor, seq_lens: Tensor) -> None:
        args.query, args.out, args.lengths = query.data_ptr(), out.data_ptr(), seq_lens.data_ptr()
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        call.use(workspace)
        start()
        merge()

    return run


def attend_packed(request: AttendRequest, device: Device, launch: Launcher) -> None:
    """The sequences of at most MAX_DECODE_QUERIES queries: one launch that attends and one that merges."""
    call, workspace = _prepare(request, device), request.workspace
    if workspace is None:
        workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=request.query.device)
    elif workspace.numel() < call.workspace_bytes or workspace.dtype != torch.uint8 or workspace.data_ptr() % 16:
        raise InputError(
            f"workspace must be uint8 with at least {call.workspace_bytes} bytes on a 16-byte boundary, "
            f"not {workspace.dtype} with {workspace.numel()}"
        )
    call.launch(workspace, launch)


@dataclass(frozen=True)
class _Call:
    """All of a call but its workspace."""

    plan: Plan
    args: Args
    grids: tuple[tuple[int, int], tuple[int, int]]  # of attend and of merge
    merge_shared: int
    part_bytes: int  # of the workspace: the parts, then their states
    workspace_bytes: int
    kept: tuple[Tensor, ...]  # what args point to and nobody else holds

    def use(self, workspace: Tensor) -> None:
        """Points the arguments to a workspace."""
        args = self.args
        args.parts = parts = workspace.data_ptr()
        args.part_states = parts + self.part_bytes

    def launch(self, workspace: Tensor, launch: Launcher) -> None:
        """Both kernels, once."""
        self.use(workspace)
        for kernel in self._kernels():
            launch(*kernel)

    def bound(self, bind: Binder) -> list[Callable[[], None]]:
        """Both kernels, for many times."""
        return [bind(*kernel) for kernel in self._kernels()]

    def _kernels(self) -> tuple[KernelCall, KernelCall]:
        plan = self.plan
        return (
            ("attend", plan.defines, self.grids[0], 32 * plan.shape.warps, plan.shared, self.args, True),
            ("merge", plan.defines, self.grids[1], 32 * _MERGE_WARPS, self.merge_shared, self.args, True),
        )


def _prepare(request: AttendRequest, device: Device) -> _Call:
    query, out, layout, options, pages = request.query, request.out, request.layout, request.options, request.pages
    (total, heads, _), num_kv_heads, sequences = query.shape, pages.shape[1], request.seq_lens.shape[0]
    group, value_dim = heads // num_kv_heads, layout.spec.value_dim
    plan = _plan(
        device, layout, group, min(request.max_query_len, MAX_DECODE_QUERIES),
        _amount(device, layout, request.max_seq_len, sequences * num_kv_heads),
        query.dtype, out.dtype, options.sliding_window is not None, options.softcap > 0,
    )  # fmt: skip
    if plan is None:
        raise InputError(f"{layout.spec.format} needs more shared memory than this device has")
    shape = plan.shape
    blocks = device.multiprocessors * shape.resident
    items = most_items(total, sequences, num_kv_heads, group, shape)
    slots = items + blocks  # every item has a part, and every block may begin another
    # Few rows have many parts, and then two warps share them; a warp alone reads some at once.
    split = total * heads <= 32 * device.multiprocessors and blocks > _PARTS_AT_ONCE * items
    merge_split = 2 if split else 1
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    key, value = request.codec.key_tables, request.codec.value_tables
    args = Args.from_buffer_copy(plan.args)
    args.query, args.query_stride, args.query_head_stride = query.data_ptr(), query.stride(0), query.stride(1)
    args.pages, args.page_stride, args.page_head_stride = pages.data_ptr(), pages.stride(0), pages.stride(1)
    args.table, args.table_stride = request.block_table.data_ptr(), request.block_table.stride(0)
    args.lengths, args.starts = request.seq_lens.data_ptr(), request.cu_seqlens_q.data_ptr()
    args.key_signs, args.key_levels, args.key_norm = key.signs.data_ptr(), key.levels.data_ptr(), key.orthonormal
    args.value_signs, args.value_levels = value.signs.data_ptr(), value.levels.data_ptr()
    args.value_norm = value.orthonormal
    args.out, args.out_stride, args.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
    args.sinks = None if sinks is None else sinks.data_ptr()
    args.lse = None if request.lse is None else request.lse.data_ptr()
    args.scale, args.softcap = request.softmax_scale * LOG2E, options.softcap * LOG2E
    args.sequences, args.heads, args.group, args.blocks = sequences, num_kv_heads, group, blocks
    args.causal, args.window, args.merge_split = options.causal, options.sliding_window or 0, merge_split
    part_bytes = 4 * slots * shape.columns * value_dim
    return _Call(
        plan, args, ((blocks, 1), (total, -(-heads * merge_split // _MERGE_WARPS))),
        4 * _MERGE_WARPS * (value_dim + 2), part_bytes, 4 * slots * shape.columns * (value_dim + 2),
        () if sinks is None else (sinks,),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plan(
    device: Device, layout: PageLayout, group: int, queries: int, amount: tuple[bool, bool], q_dtype: torch.dtype,
    out_dtype: torch.dtype, window: bool, softcap: bool,
) -> Plan | None:  # fmt: skip
    shape = _shape_on(device, layout, group, queries, *amount)
    if shape is None:
        return None
    spec = layout.spec
    args = Args(
        key_table=_Table(*_table(spec.key, spec.key_dim, shape.wide)),
        value_table=_Table(*_table(spec.value, spec.value_dim, shape.wide)),
        key_sign_bits=_SignBits(*sign_words(spec.key_dim, spec.seed)),
        value_sign_bits=_SignBits(*sign_words(spec.value_dim, spec.seed)),
        most_queries=MAX_DECODE_QUERIES,
    )  # fmt: skip
    defines = kernel_defines(layout, shape, DTYPE_NUMBERS[q_dtype], DTYPE_NUMBERS[out_dtype], window, softcap)
    return Plan(shape, defines, shared_bytes(layout, shape), args)


def most_items(total: int, sequences: int, num_kv_heads: int, group: int, shape: Shape) -> int:
    """Most (sequence, chunk of queries, KV head) of one call."""
    return min(total, total // (shape.columns // group) + sequences) * num_kv_heads


def workspace_bytes(
    layout: PageLayout, total_queries: int, sequences: int, num_kv_heads: int, group: int, max_query_len: int,
    device: torch.device,
) -> int:  # fmt: skip
    """Bytes that ``attend`` needs as ``workspace`` for these bounds."""
    about, need = device_of(device), 0
    for queries in range(1, min(max_query_len, MAX_DECODE_QUERIES) + 1):
        for tokens, rows in ((0, 1), (1 << 20, 0), (1 << 20, 1 << 20)):
            shape = shape_on(about, layout, group, queries, tokens, rows)
            if shape is not None:
                items = most_items(total_queries, sequences, num_kv_heads, group, shape)
                slots = items + about.multiprocessors * shape.resident
                need = max(need, 4 * slots * shape.columns * (layout.spec.value_dim + 2))
    return need


# -- the shape ---------------------------------------------------------------------------------------------------------


def _most_columns(layout: PageLayout) -> int:
    return 16 if max(layout.spec.key_dim, layout.spec.value_dim) <= 128 else 8


def _shape(request: AttendRequest) -> Shape | None:
    device, queries = device_of(request.query.device), min(request.max_query_len, MAX_DECODE_QUERIES)
    rows = request.seq_lens.shape[0] * request.pages.shape[1]
    return shape_on(device, request.layout, request.group, queries, request.max_seq_len, rows)


def shape_on(
    device: Device, layout: PageLayout, group: int, queries: int, tokens: int, rows: int = 1 << 20
) -> Shape | None:
    """The first shape that fits: ``rows`` (sequence, KV head) of up to ``tokens`` tokens and ``queries`` queries."""
    return _shape_on(device, layout, group, queries, *_amount(device, layout, tokens, rows))


def _amount(device: Device, layout: PageLayout, tokens: int, rows: int) -> tuple[bool, bool]:
    """All that a shape depends on of the tokens, which differ at every step: are sequences short, is all work little.

    A block of many warps with little to do for each of them leaves some idle at its end.
    """
    short = tokens * layout.page_bytes < _SHORT_BYTES * layout.block_size
    return short, rows * tokens < _LITTLE_TOKENS * device.multiprocessors


@lru_cache(maxsize=1024)
def _shape_on(device: Device, layout: PageLayout, group: int, queries: int, short: bool, little: bool) -> Shape | None:
    most = _most_columns(layout)
    columns = next(n for n in (4, 8, 16) if n >= most or n >= group * queries)
    for tiles, warps, stages, resident in (_SHORT if short else _LONG)[columns]:
        if little and not short and warps > 8:
            continue
        shape = Shape(max(1, columns // 8), columns > 4, tiles, warps, stages, resident)
        shared = shared_bytes(layout, shape)
        if shared <= device.shared_of_block and (shared + 1024) * resident <= device.shared_of_multiprocessor:
            return shape
    return None


@lru_cache(maxsize=1024)
def shared_bytes(layout: PageLayout, shape: Shape) -> int:
    """Shared memory of a block; decode.cu counts the same and is not compiled otherwise."""
    spec = layout.spec
    fields = 32 * (spec.key.field_count + spec.value.field_count)
    tile = 16 * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields
    slot = max(shape.tiles * tile, 4 * shape.columns // shape.groups * (spec.value_dim + 8))
    levels = sum(128 << f.bits for f in (spec.key, spec.value) if f.kind == Kind.LLOYD and f.bits > 4)
    query = 8 * shape.groups * spec.key_dim * (1 if _in_bytes(spec.key) and not shape.wide else 2)
    states = 8 * shape.columns * (1 + shape.warps)
    return shape.warps * shape.stages * slot + levels + query + states


def _in_bytes(fmt: TensorFormat) -> bool:
    """Whether the integer tensor cores take its codes."""
    return fmt.kind == Kind.UNIFORM or (fmt.kind == Kind.LLOYD and fmt.bits <= 4)


@lru_cache(maxsize=256)
def kernel_defines(
    layout: PageLayout, shape: Shape, q_type: int, out_type: int, window: bool, softcap: bool
) -> Defines:
    """What decode.cu is compiled with."""

    def side(prefix: str, s: SideLayout) -> dict[str, int]:
        return {
            f"{prefix}_KIND": KIND_NUMBERS[s.format.kind],
            f"{prefix}_BITS": s.format.bits,
            f"{prefix}_FIELDS": s.fields_offset,
            f"{prefix}_ROTATED": int(s.format.rotated),
        }

    return Defines({
        "BLOCK_SIZE": layout.block_size, "KD": layout.spec.key_dim, "VD": layout.spec.value_dim,
        "V_CODES": layout.value.codes_offset, **side("K", layout.key), **side("V", layout.value),
        "NG": shape.groups, "WIDE": int(shape.wide), "NT": shape.tiles, "WARPS": shape.warps, "STAGES": shape.stages,
        "MIN_BLOCKS": shape.resident,
        "SHARED": shared_bytes(layout, shape), "Q_TYPE": q_type, "OUT_TYPE": out_type,
        "WINDOW": int(window), "SOFTCAP": int(softcap),
    })  # fmt: skip


# -- tables of bytes ---------------------------------------------------------------------------------------------------


def _words(entries: list[int]) -> tuple[int, int]:
    padded = [entries[min(i, len(entries) - 1)] & 0xFF for i in range(8)]
    return sum(b << 8 * i for i, b in enumerate(padded[:4])), sum(b << 8 * i for i, b in enumerate(padded[4:]))


@lru_cache(maxsize=64)
def _table(fmt: TensorFormat, dim: int, wide: bool) -> tuple[int, int]:
    """Wide: twice the positive levels. Otherwise the bytes of codes: level + 63.5; at 4 bits what an exclusive or with
    0xFF (positive) or 0x80 makes that of.
    """
    if not _in_bytes(fmt) or fmt.bits > 4:
        return 0, 0
    if fmt.kind == Kind.UNIFORM:
        return _words(list(range(8)))
    levels = codebook(fmt.bits, dim).levels_by_code.tolist()
    if wide:
        return _words([int(2 * level) for level in levels[len(levels) // 2 :]])
    if fmt.bits == 4:
        return _words([0xFF ^ int(level + 63.5) for level in levels[8:]])
    return _words([int(level + 63.5) for level in levels])


# -- the device --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Numbers of a CUDA device."""
    about: Any = torch.cuda.get_device_properties(device)
    return Device(
        about.multi_processor_count, about.shared_memory_per_multiprocessor, about.shared_memory_per_block_optin
    )


@lru_cache(maxsize=64)
def _launcher(device: torch.device) -> Launcher:
    def launch(
        name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int, args: Args, overlap: bool
    ) -> None:
        load(SOURCE, defines, device).kernel(name).launch(grid, threads, shared, args, device, overlap)

    return launch


def _binder(device: torch.device) -> Binder:
    def bind(
        name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int, args: Args, overlap: bool
    ) -> Callable[[], None]:
        return load(SOURCE, defines, device).kernel(name).bound(grid, threads, shared, args, device, overlap)

    return bind
