"""attend_latent with CUDA C++ for Hopper: how its kernels (source/latent) are chosen, compiled and launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from slimkv.codec.rotation import sign_words
from slimkv.errors import InputError
from slimkv.ops.attention.cuda.decode import device_of
from slimkv.ops.attention.cuda.device import Device
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.latent.api import LatentRequest
from slimkv.ops.latent.cuda import narrow, split, wide
from slimkv.spec import Kind, PageLayout

_LEAST_MERGE_WARPS, _MOST_MERGE_WARPS = 8, 32  # of a block, as merge.cuh has them
_RAW = 3
_LATENT_DIMS = (64, 128, 192, 256, 320, 384, 448, 512)
_ROPE_DIMS = (32, 64, 128)


class _Table(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint32), ("high", ctypes.c_uint32), ("signs", ctypes.c_uint32))


class Args(ctypes.Structure):
    """The kernels' argument; args.cuh says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "rope", "pages", "block_table", "seq_lens", "cu_seqlens_q", "latent_levels", "rope_levels", "out",
            "lse", "parts", "states",
        )),
        *((name, ctypes.c_int64) for name in (
            "query_stride", "query_head_stride", "rope_stride", "rope_head_stride", "page_stride", "table_stride",
            "out_stride", "out_head_stride",
        )),
        ("scale", ctypes.c_float),
        ("rope_norm", ctypes.c_float),
        ("table", _Table),
        ("rope_sign_bits", ctypes.c_uint32 * 4),
        *((name, ctypes.c_int32) for name in ("heads", "row_tiles", "splits", "sequences", "blocks", "mergers")),
    )  # fmt: skip


Cut = narrow.Cut | wide.Cut | split.Cut
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, Args], None]


def runs_on(device: torch.device) -> bool:
    """Whether the device has the instructions, which are those of compute capability 9.0 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def supports(request: LatentRequest) -> str | None:
    """On Hopper: Lloyd-Max and fp8 latents of up to 512; rope parts raw (16 bits), fp8 or of 6 to 8 bits."""
    if not runs_on(request.pages.device):
        return "it uses instructions of Hopper (compute capability 9.0) alone; use backend='triton'"
    return refusal(request)


def refusal(request: LatentRequest) -> str | None:
    """Why a Hopper device does not take the request, or None."""
    if request.num_splits is not None:
        return f"it partitions tokens itself, not as num_splits={request.num_splits} asks; leave num_splits at None"
    spec = request.layout.spec
    bf16 = spec.value.kind == Kind.RAW and spec.value.raw_dtype == "bfloat16"
    if bf16 and request.query_rope.dtype != torch.bfloat16:
        return (
            f"beside a bfloat16 rope part it takes bfloat16 query_rope, not {request.query_rope.dtype}; "
            "use backend='triton'"
        )
    return _format_refusal(request.layout)


@lru_cache(maxsize=256)
def _format_refusal(layout: PageLayout) -> str | None:
    spec = layout.spec
    if layout.block_size < 16:
        return "it reads blocks of 16 tokens and more; use backend='reference'"
    if spec.key.kind not in (Kind.LLOYD, Kind.FP8):
        return f"latent format {spec.key.name} is not one of its formats (1-8, fp8); use backend='triton'"
    rope_fits = (
        (spec.value.kind == Kind.RAW and spec.value.bits == 16)
        or (spec.value.kind == Kind.LLOYD and spec.value.bits >= 6)
        or spec.value.kind == Kind.FP8
    )
    if not rope_fits:
        return (
            f"rope format {spec.value.name} is not one of its formats (rawbf16, rawfp16, fp8, 6-8); "
            "use backend='triton'"
        )
    if spec.key_dim not in _LATENT_DIMS or spec.value_dim not in _ROPE_DIMS:
        return (
            f"a latent of {spec.key_dim} with a rope part of {spec.value_dim} is not one of its sizes (multiples of 64 "
            f"up to {_LATENT_DIMS[-1]}; {', '.join(map(str, _ROPE_DIMS))}); use backend='triton'"
        )
    return None


@lru_cache(maxsize=512)
def even_cut(layout: PageLayout, rows: int, device: Device) -> narrow.Cut | wide.Cut | None:
    """The kernel with an even partition for sequences of up to ``rows`` (query, head) pairs, if one takes them."""
    return narrow.cut_for(layout, device) if rows <= narrow.Cut.rows else wide.cut_for(layout, rows, device)


def even_rows(cut: narrow.Cut | wide.Cut, rows: int, sequences: int) -> int:
    """Rows of all its parts: every item has one, and every block may begin another."""
    return (sequences * -(-rows // cut.rows) + cut.blocks) * cut.rows


def mergers_of(rows: int, dim: int, device: Device) -> int:
    """Warps that merge a row of parts: as many as the device has room for at a time, with 64 registers a thread."""
    warps = rows * -(-dim // _merged_dims(dim))
    mergers = 1
    while mergers < _MOST_MERGE_WARPS and 2 * mergers * warps <= 32 * device.multiprocessors:
        mergers *= 2
    return mergers


def _merged_dims(dim: int) -> int:
    return 256 if dim % 256 == 0 else 128  # of a block, as merge.cuh has them


def kernel_defines(
    layout: PageLayout, cut: Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> dict[str, int]:
    """What a kernel is compiled with."""
    spec = layout.spec
    return cut.defines | {
        "LD": spec.key_dim, "RD": spec.value_dim, "BLOCK_SIZE": layout.block_size,
        "L_KIND": KIND_NUMBERS[spec.key.kind], "L_BITS": spec.key.bits, "L_FIELDS": layout.key.fields_offset,
        "R_KIND": KIND_NUMBERS.get(spec.value.kind, _RAW), "R_BITS": spec.value.bits,
        "R_CODES": layout.value.codes_offset, "R_FIELDS": layout.value.fields_offset,
        "R_BF16": int(spec.value.raw_dtype == "bfloat16"), "R_ROTATED": int(spec.value.rotated),
        "Q_TYPE": DTYPE_NUMBERS[query], "ROPE_TYPE": DTYPE_NUMBERS[rope], "OUT_TYPE": DTYPE_NUMBERS[out],
    }  # fmt: skip


@lru_cache(maxsize=512)
def _defines(layout: PageLayout, cut: Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype) -> Defines:
    return Defines(kernel_defines(layout, cut, query, rope, out))


def workspace_bytes(
    layout: PageLayout, total_queries: int, sequences: int, heads: int, max_query_len: int, device: Device
) -> int:
    """Bytes that ``attend_latent`` needs as ``workspace`` for these bounds, whatever the lengths."""
    need, dim = 0, layout.spec.key_dim
    for queries in range(1, min(max_query_len, max(1, total_queries)) + 1):
        rows = heads * queries
        cut = even_cut(layout, rows, device)
        if cut is None:
            own = split.workspace_bytes(layout, rows, sequences, device)
        else:
            own = 4 * even_rows(cut, rows, sequences) * (dim + 2)
        need = max(need, own)
    return need


def run(request: LatentRequest) -> None:
    """See ``slimkv.ops.attend_latent``."""
    if request.query_latent.shape[0] == 0 or request.max_query_len == 0:
        return
    device = request.pages.device

    def launch(
        source: str, name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int, args: Args
    ) -> None:
        module = load(source, defines, device, exactly=True)
        module.kernel(name).launch(grid, threads, shared, args, device, overlap=True)

    attend(request, device_of(device), launch)


def attend(request: LatentRequest, device: Device, launch: Launcher) -> None:
    """One launch that attends and one that merges."""
    rows = request.query_latent.shape[1] * request.max_query_len
    cut = even_cut(request.layout, rows, device)
    if cut is None:
        _attend_split(request, device, launch)
        return
    query = _in_whole_words(request.query_latent)
    if query is not request.query_latent:
        request = replace(request, query_latent=query)
    sequences, dim = request.seq_lens.shape[0], request.layout.spec.key_dim
    parts, row_tiles = even_rows(cut, rows, sequences), -(-rows // cut.rows)
    workspace = _workspace(request, 4 * parts * (dim + 2))  # alive until both are launched
    args = _args(request, workspace, parts)
    args.row_tiles, args.sequences, args.blocks = row_tiles, sequences, cut.blocks
    merged = sequences * row_tiles * cut.rows
    args.mergers = mergers_of(merged, dim, device)
    defines = _defines(request.layout, cut, *_dtypes(request))
    launch(cut.source, "attend", defines, (cut.blocks, 1), cut.threads, cut.shared, args)
    dims, warps = _merged_dims(dim), max(args.mergers, _LEAST_MERGE_WARPS)
    rows = warps // args.mergers
    shared = 4 * warps * (dims + 1) + 8 * rows * cut.blocks
    launch(cut.source, "merge", defines, (merged // rows, -(-dim // dims)), 32 * warps, shared, args)


def _attend_split(request: LatentRequest, device: Device, launch: Launcher) -> None:
    layout, heads, sequences = request.layout, request.query_latent.shape[1], request.seq_lens.shape[0]
    dim = layout.spec.key_dim
    cut = split.cut_for(layout, heads, request.max_query_len, sequences, request.max_seq_len, device)
    workspace = _workspace(request, cut.workspace_bytes(sequences, dim))
    args = _args(request, workspace, sequences * cut.row_tiles * cut.splits * cut.rows)
    args.row_tiles, args.splits = cut.row_tiles, cut.splits
    defines = _defines(layout, cut, *_dtypes(request))
    items, merged = sequences * cut.row_tiles, 4 * split.MERGERS * (dim + 1)
    launch(cut.source, "attend", defines, (items, cut.splits), split.GROUP_THREADS * cut.groups, cut.shared, args)
    launch(cut.source, "merge", defines, (items * cut.rows, 1), split.MERGE_THREADS, merged, args)


def _in_whole_words(query: torch.Tensor) -> torch.Tensor:
    """The queries, as a copy where two numbers of 16 bits are not a word."""
    even = query.element_size() == 4 or not (query.data_ptr() % 4 or (query.stride(0) | query.stride(1)) % 2)
    return query if even else query.clone(memory_format=torch.contiguous_format)


def _dtypes(request: LatentRequest) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    return request.query_latent.dtype, request.query_rope.dtype, request.out.dtype


def _args(request: LatentRequest, workspace: torch.Tensor, rows: int) -> Args:
    """Arguments with ``rows`` rows of parts in the workspace, without what is cut."""
    query, rope, out, spec = request.query_latent, request.query_rope, request.out, request.layout.spec
    latent, rope_tables = request.codec.key_tables, request.codec.value_tables
    return Args(
        query=query.data_ptr(), rope=rope.data_ptr(), pages=request.pages.data_ptr(),
        block_table=request.block_table.data_ptr(), seq_lens=request.seq_lens.data_ptr(),
        cu_seqlens_q=request.cu_seqlens_q.data_ptr(), latent_levels=latent.levels.data_ptr(),
        rope_levels=rope_tables.levels.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), parts=workspace.data_ptr(),
        states=workspace.data_ptr() + 4 * rows * spec.key_dim,
        query_stride=query.stride(0), query_head_stride=query.stride(1), rope_stride=rope.stride(0),
        rope_head_stride=rope.stride(1), page_stride=request.pages.stride(0),
        table_stride=request.block_table.stride(0), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, rope_norm=rope_tables.orthonormal,
        table=_Table(*level_bytes(spec.key, spec.key_dim), 0x80808080),
        rope_sign_bits=(ctypes.c_uint32 * 4)(*sign_words(spec.value_dim, spec.seed)),
        heads=query.shape[1],
    )  # fmt: skip


def _workspace(request: LatentRequest, need: int) -> torch.Tensor:
    space = request.workspace
    if space is None:
        return torch.empty(need, dtype=torch.uint8, device=request.pages.device)
    if space.dtype != torch.uint8 or space.numel() < need or not space.is_contiguous() or space.data_ptr() % 16:
        raise InputError(
            f"the workspace must be contiguous uint8 of at least {need} bytes, 16-byte aligned; it has {space.numel()}"
        )
    return space
