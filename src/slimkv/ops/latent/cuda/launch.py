"""attend_latent with CUDA C++ for Hopper: how the kernel (source/latent/attend.cu) is cut, compiled and launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from slimkv.codec.rotation import sign_words
from slimkv.errors import InputError
from slimkv.ops.attention.cuda.decode import device_of
from slimkv.ops.attention.cuda.shape import Device, level_bytes
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.latent.api import LatentRequest
from slimkv.ops.latent.cuda import narrow
from slimkv.spec import Kind, PageLayout, TensorFormat

SOURCE = "latent/attend.cu"
GROUP_THREADS, GROUP_TOKENS, MERGE_THREADS, MERGERS = 128, 64, 512, 4  # as shape.cuh and attend.cu have them
_RAW = 3
_LATENT_DIMS = (64, 128, 192, 256, 320, 384, 448, 512)
_ROPE_DIMS = (32, 64, 128)
_ROWS = (8, 16, 32, 64)
# 64 rows unpack for twice as many, but take two warpgroups in step and a multiprocessor to themselves; two blocks of 32
# overlap, one unpacking while the other multiplies.
MOST_ROWS = 32
MOST_NARROW = 16
_RESERVED = 1024  # bytes of shared memory that the driver keeps of every block
_LEVEL_COPIES = 32  # of a latent's levels
_LEAST_TILES, _MOST_SPLITS = 4, 256


class _Table(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint32), ("high", ctypes.c_uint32), ("signs", ctypes.c_uint32))


class Args(ctypes.Structure):
    """The kernels' argument; shape.cuh says what each is."""

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
        *((name, ctypes.c_int32) for name in ("heads", "row_tiles", "splits", "sequences", "blocks")),
    )  # fmt: skip


Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, Args], None]


@dataclass(frozen=True)
class Cut:
    """How a request is cut into blocks."""

    rows: int  # (query, head) pairs of a block
    row_tiles: int  # blocks for the rows of a sequence
    splits: int  # parts of a sequence's tokens
    shared: int  # bytes of a block
    resident: int  # blocks of a multiprocessor

    @property
    def groups(self) -> int:
        """Warpgroups of a block: two where the output of all rows does not fit the registers of one."""
        return groups_of(self.rows)

    def workspace_bytes(self, sequences: int, latent_dim: int) -> int:
        """Bytes of the parts and of their states."""
        return 4 * sequences * self.row_tiles * self.splits * self.rows * (latent_dim + 2)


def runs_on(device: torch.device) -> bool:
    """Whether the device has the instructions, which are those of compute capability 9.0 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def groups_of(rows: int) -> int:
    """Warpgroups of a block of ``rows``."""
    return 2 if rows > 32 else 1


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


def _level_entries(fmt: TensorFormat) -> int:
    """Levels that a kernel looks up in shared memory: those of up to 4 bits are made by byte permutations."""
    return 1 << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > 4 else 0


def shared_bytes(layout: PageLayout, rows: int) -> int:
    """Shared memory of a block, as shape.cuh counts it."""
    spec = layout.spec
    chunks, rope_chunks = spec.key_dim // 64, -(-spec.value_dim // 64)
    groups = groups_of(rows)
    operands = 128 * (groups * chunks * GROUP_TOKENS + (chunks + rope_chunks + groups) * rows)
    rope_copies = 8 if rows < 32 else 4
    levels = 4 * (_LEVEL_COPIES * _level_entries(spec.key) + rope_copies * _level_entries(spec.value))
    return operands + 16 * (1 + groups) * rows + levels + 1024


def _rows_of_block(layout: PageLayout, wanted: int, device: Device) -> int:
    """Rows of a block for ``wanted`` rows of a sequence, as many as fit."""
    fit = [
        rows
        for rows in _ROWS
        if rows <= MOST_ROWS
        and shared_bytes(layout, rows) <= device.shared_of_block
        and layout.spec.key_dim % (64 * groups_of(rows)) == 0
    ]
    return next((rows for rows in fit if rows >= wanted), fit[-1])


def cut_for(
    layout: PageLayout, heads: int, max_query_len: int, sequences: int, max_seq_len: int, device: Device
) -> Cut:
    """The blocks for sequences of up to ``max_query_len`` queries and ``max_seq_len`` tokens."""
    wanted = heads * max_query_len
    rows = _rows_of_block(layout, wanted, device)
    row_tiles = -(-wanted // rows)
    shared = shared_bytes(layout, rows)
    # Two warpgroups of a block take all registers.
    resident = 2 if groups_of(rows) == 1 and 2 * (shared + _RESERVED) <= device.shared_of_multiprocessor else 1
    slots, blocks = device.multiprocessors * resident, sequences * row_tiles
    tiles = max(1, -(-max_seq_len // (GROUP_TOKENS * groups_of(rows))))

    def time(splits: int) -> int:  # in tiles, with what it takes to start a block and to merge its part
        return -(-blocks * splits // slots) * (-(-tiles // splits) + _LEAST_TILES) + splits // 32

    most = min(_MOST_SPLITS, max(1, tiles // _LEAST_TILES), max(1, 2 * slots // blocks))
    return Cut(rows, row_tiles, min(range(1, most + 1), key=time), shared, resident)


def _common_defines(
    layout: PageLayout, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> dict[str, int]:
    spec = layout.spec
    return {
        "LD": spec.key_dim, "RD": spec.value_dim, "BLOCK_SIZE": layout.block_size,
        "L_KIND": KIND_NUMBERS[spec.key.kind], "L_BITS": spec.key.bits, "L_FIELDS": layout.key.fields_offset,
        "R_KIND": KIND_NUMBERS.get(spec.value.kind, _RAW), "R_BITS": spec.value.bits,
        "R_CODES": layout.value.codes_offset, "R_FIELDS": layout.value.fields_offset,
        "R_BF16": int(spec.value.raw_dtype == "bfloat16"), "R_ROTATED": int(spec.value.rotated),
        "Q_TYPE": DTYPE_NUMBERS[query], "ROPE_TYPE": DTYPE_NUMBERS[rope], "OUT_TYPE": DTYPE_NUMBERS[out],
    }  # fmt: skip


def kernel_defines(
    layout: PageLayout, cut: Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> dict[str, int]:
    """What latent/attend.cu is compiled with."""
    return _common_defines(layout, query, rope, out) | {
        "ROWS": cut.rows, "WARPGROUPS": cut.groups, "RESIDENT": cut.resident, "SHARED": cut.shared,
    }  # fmt: skip


def narrow_defines(
    layout: PageLayout, cut: narrow.Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> dict[str, int]:
    """What latent/narrow.cu is compiled with."""
    v = cut.variant
    return _common_defines(layout, query, rope, out) | {
        "STAGES": cut.stages, "SHARED": cut.shared, "RESIDENT": cut.resident, "V_SHARED": v.shared_values,
        "Q_REGISTERS": v.query_registers, "MOVE_EARLY": v.move_early, **narrow.EXTRA,
    }  # fmt: skip


@lru_cache(maxsize=512)
def _narrow_defines(
    layout: PageLayout, cut: narrow.Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> Defines:
    return Defines(narrow_defines(layout, cut, query, rope, out))


@lru_cache(maxsize=512)
def _defines(layout: PageLayout, cut: Cut, query: torch.dtype, rope: torch.dtype, out: torch.dtype) -> Defines:
    return Defines(kernel_defines(layout, cut, query, rope, out))


def workspace_bytes(
    layout: PageLayout, total_queries: int, sequences: int, heads: int, max_query_len: int, device: Device
) -> int:
    """Bytes that ``attend_latent`` needs as ``workspace`` for these bounds, whatever the lengths."""
    few = narrow.cut_for(layout, device)
    need = 4 * (sequences + few.blocks) * narrow.ROWS * (layout.spec.key_dim + 2)
    for queries in range(1, min(max_query_len, max(1, total_queries)) + 1):
        rows = _rows_of_block(layout, heads * queries, device)
        row_tiles = -(-heads * queries // rows)
        most = min(_MOST_SPLITS, max(1, 4 * device.multiprocessors // (sequences * row_tiles)))
        need = max(need, Cut(rows, row_tiles, most, 0, 0).workspace_bytes(sequences, layout.spec.key_dim))
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
    layout, heads, sequences = request.layout, request.query_latent.shape[1], request.seq_lens.shape[0]
    dim, dtypes = layout.spec.key_dim, (request.query_latent.dtype, request.query_rope.dtype, request.out.dtype)
    wanted = heads * request.max_query_len
    if wanted <= MOST_NARROW:
        few = narrow.cut_for(layout, device)
        row_tiles = -(-wanted // narrow.ROWS)
        items = sequences * row_tiles
        rows = (items + few.blocks) * narrow.ROWS
        args = _args(request, _workspace(request, 4 * rows * (dim + 2)), rows)
        args.row_tiles, args.sequences, args.blocks = row_tiles, sequences, few.blocks
        defines = _narrow_defines(layout, few, *dtypes)
        launch(narrow.SOURCE, "attend", defines, (few.blocks, 1), narrow.THREADS, few.shared, args)
        launch(
            narrow.SOURCE, "merge", defines, (items * narrow.ROWS, 1), MERGE_THREADS, 4 * MERGERS * (dim + 1), args
        )
        return
    cut = cut_for(layout, heads, request.max_query_len, sequences, request.max_seq_len, device)
    parts = sequences * cut.row_tiles * cut.splits * cut.rows
    args = _args(request, _workspace(request, cut.workspace_bytes(sequences, dim)), parts)
    args.row_tiles, args.splits = cut.row_tiles, cut.splits
    defines = _defines(layout, cut, *dtypes)
    items, merged = sequences * cut.row_tiles, 4 * MERGERS * (dim + 1)
    launch(SOURCE, "attend", defines, (items, cut.splits), GROUP_THREADS * cut.groups, cut.shared, args)
    launch(SOURCE, "merge", defines, (items * cut.rows, 1), MERGE_THREADS, merged, args)


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
