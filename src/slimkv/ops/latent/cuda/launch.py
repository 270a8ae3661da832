"""attend_latent with CUDA C++ for Hopper: supported requests, and the launch of the kernels (source/latent)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from slimkv.codec.rotation import sign_words
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.checks import workspace_of
from slimkv.ops.cuda.arguments import arguments
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E, RAW_NUMBER
from slimkv.ops.cuda.device import Device, device_of
from slimkv.ops.cuda.module import Defines, load
from slimkv.ops.latent.api import LatentRequest
from slimkv.ops.latent.cuda.config import LatentConfig, config_for
from slimkv.spec import Kind, PageLayout

_LATENT_DIMS = (64, 128, 192, 256, 320, 384, 448, 512)
_ROPE_DIMS = (32, 64, 128)
_ROW_DIMS = (128, 256, 512)  # latent sizes in token rows
MIN_MERGE_WARPS, MAX_MERGE_WARPS = 8, 32  # per block of the merge kernel


(Args,) = arguments("latent/args.cuh", "LatentArgs")
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, ctypes.Structure], None]


def runs_on(device: torch.device) -> bool:
    """Whether the device has the required instructions (compute capability 9.0 only)."""
    return device.type == "cuda" and device_of(device).warpgroups


def supports(request: LatentRequest) -> str | None:
    """None on Hopper for Lloyd-Max and fp8 latents up to 512 with raw, fp8 or 6-8-bit rope parts; else the reason."""
    if not runs_on(request.pages.device):
        return "it needs a Hopper GPU (compute capability 9.0); use backend='triton'"
    return refusal(request)


def refusal(request: LatentRequest) -> str | None:
    """Why the kernels do not support the request on Hopper, or None."""
    if request.num_splits is not None:
        return f"it chooses splits itself; leave num_splits at None instead of {request.num_splits}"
    spec = request.layout.spec
    bf16 = spec.value.kind == Kind.RAW and spec.value.raw_dtype == "bfloat16"
    if bf16 and request.query_rope.dtype != torch.bfloat16:
        return (
            f"with a bfloat16 rope part it takes bfloat16 query_rope, not {request.query_rope.dtype}; "
            "use backend='triton'"
        )
    return format_refusal(request.layout)


@lru_cache(maxsize=256)
def format_refusal(layout: PageLayout) -> str | None:
    """Why the kernels do not support this layout, or None."""
    spec = layout.spec
    if layout.block_size < 16:
        return "it needs blocks of at least 16 tokens; use backend='reference'"
    if layout.token_rows and not _reads_rows(layout):
        return (
            "in token rows it reads 4-bit Lloyd-Max latents of 128, 256 or 512 with a raw rope part of 64 numbers of "
            f"16 bits (format 'c4'), not {spec.format} of {spec.key_dim} and {spec.value_dim}; use 'c4' or "
            "backend='reference'"
        )
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


def _reads_rows(layout: PageLayout) -> bool:
    latent, rope = layout.key, layout.value
    four_bits = latent.format.kind == Kind.LLOYD and latent.format.bits == 4
    raw = rope.format.kind == Kind.RAW and rope.format.bits == 16
    return four_bits and raw and latent.dim in _ROW_DIMS and rope.dim == 64


@lru_cache(maxsize=512)
def kernel_defines(
    layout: PageLayout, config: LatentConfig, query: torch.dtype, rope: torch.dtype, out: torch.dtype
) -> Defines:
    """The defines of a kernel."""
    spec = layout.spec
    return Defines({
        "ROWS": config.kernel.rows, "KV_BLOCK": config.kernel.kv_block, "STAGES": config.stages,
        "SHARED_BYTES": config.shared,
        "LD": spec.key_dim, "RD": spec.value_dim, "BLOCK_SIZE": layout.block_size,
        "ROW_STRIDE": layout.key.row_stride,
        "L_KIND": KIND_NUMBERS[spec.key.kind], "L_BITS": spec.key.bits, "L_FIELDS": layout.key.fields_offset,
        "R_KIND": KIND_NUMBERS.get(spec.value.kind, RAW_NUMBER), "R_BITS": spec.value.bits,
        "R_CODES": layout.value.codes_offset, "R_FIELDS": layout.value.fields_offset,
        "R_BF16": int(spec.value.raw_dtype == "bfloat16"), "R_ROTATED": int(spec.value.rotated),
        "MERGE_DIMS": merge_dims(spec.key_dim), "MIN_MERGE_WARPS": MIN_MERGE_WARPS, "MAX_MERGE_WARPS": MAX_MERGE_WARPS,
        "Q_TYPE": DTYPE_NUMBERS[query], "ROPE_TYPE": DTYPE_NUMBERS[rope], "OUT_TYPE": DTYPE_NUMBERS[out],
    })  # fmt: skip


def workspace_bytes(
    layout: PageLayout, total_queries: int, sequences: int, heads: int, max_query_len: int, device: Device
) -> int:
    """The bytes of ``workspace`` that ``attend_latent`` needs within these bounds; 0 if the layout is not supported."""
    if format_refusal(layout) is not None:
        return 0
    most = 0
    for queries in range(1, min(max_query_len, max(1, total_queries)) + 1):
        rows = heads * queries
        most = max(most, config_for(layout, rows, device).partial_rows(rows, sequences))
    return _partial_bytes(layout, most)


def _partial_bytes(layout: PageLayout, rows: int) -> int:
    """The bytes of ``rows`` partial results: weighted values in fp16, running maximum, sum of probabilities, and a
    16-byte ``TileParts`` per work tile of at least 16 rows."""
    return rows * (2 * layout.spec.key_dim + 8) + rows


def run(request: LatentRequest) -> None:
    """See ``slimkv.ops.attend_latent``."""
    if request.query_latent.shape[0] == 0 or request.max_query_len == 0:
        return
    device = request.pages.device

    def launch(
        source: str, name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int,
        args: ctypes.Structure,
    ) -> None:  # fmt: skip
        module = load(source, defines, device, exactly=True)
        module.kernel(name).launch(grid, threads, shared, args, device, overlap=True)

    attend(request, device_of(device), launch)


def attend(request: LatentRequest, device: Device, launch: Launcher) -> None:
    """Launches ``attend``, then ``merge``."""
    query = request.query_latent
    if query.element_size() < 4 and (query.data_ptr() % 4 or (query.stride(0) | query.stride(1)) % 2):
        query = query.clone(memory_format=torch.contiguous_format)  # pairs of 16-bit values in aligned words
        request = replace(request, query_latent=query)
    rows, sequences, dim = query.shape[1] * request.max_query_len, request.seq_lens.shape[0], query.shape[2]
    config = config_for(request.layout, rows, device)
    partial_rows, tiles = config.partial_rows(rows, sequences), config.row_tiles(rows)
    workspace = workspace_of(  # alive until both are launched
        request.workspace, _partial_bytes(request.layout, partial_rows), request.pages.device
    )
    args = _args(request, workspace, partial_rows)
    out, whole = request.out, 4 * request.out.element_size()
    even = out.stride(0) == out.shape[1] * out.stride(1)  # rows are evenly spaced, and groups of four values aligned
    direct = even and not (out.data_ptr() % whole or out.stride(1) % 4)
    # Blocks write whole work tiles to the output; the others need a merge, at most one per pair of adjacent blocks.
    merged_rows = (min(sequences * tiles, config.blocks) if direct else sequences * tiles) * config.kernel.rows
    args.row_tiles, args.num_seqs, args.blocks, args.direct = tiles, sequences, config.blocks, direct
    args.merge_warps = merge_warps(merged_rows, dim, device)
    defines = kernel_defines(request.layout, config, query.dtype, request.query_rope.dtype, out.dtype)
    source = config.kernel.source
    launch(source, "attend", defines, (config.blocks, 1), config.kernel.threads, config.shared, args)
    dims, warps = merge_dims(dim), max(args.merge_warps, MIN_MERGE_WARPS)
    rows_of_block = warps // args.merge_warps
    args.merge_rounds = merge_rounds(merged_rows, rows_of_block, config.kernel.rows, dim, device)
    shared = 4 * warps * (dims + 1) + 8 * rows_of_block * config.blocks
    grid = merged_rows // (rows_of_block * args.merge_rounds), -(-dim // dims)
    launch(source, "merge", defines, grid, 32 * warps, shared, args)


def merge_dims(dim: int) -> int:
    """The dimensions of a row that a block of the merge kernel merges."""
    return 256 if dim % 256 == 0 else 128


def merge_warps(rows: int, dim: int, device: Device) -> int:
    """The warps that share a row's partial results: as many as fit the device with 64 registers per thread."""
    warps = rows * -(-dim // merge_dims(dim))
    shared_by = 1
    while shared_by < MAX_MERGE_WARPS and 2 * shared_by * warps <= 32 * device.multiprocessors:
        shared_by *= 2
    return shared_by


def merge_rounds(rows: int, rows_of_block: int, rows_of_tile: int, dim: int, device: Device) -> int:
    """The groups of rows that a block of the merge kernel merges in turn, so that all blocks run concurrently."""
    warps, rounds = rows * -(-dim // merge_dims(dim)), 1  # several warps share a row only if all fit
    while warps > rounds * 32 * device.multiprocessors and rows_of_tile % (2 * rounds * rows_of_block) == 0:
        rounds *= 2
    return rounds


def _args(request: LatentRequest, workspace: torch.Tensor, partial_rows: int) -> ctypes.Structure:
    """The arguments that do not depend on the kernel, with room for ``partial_rows`` in the workspace."""
    query, rope, out, spec = request.query_latent, request.query_rope, request.out, request.layout.spec
    latent, rope_tables = request.codec.key_tables, request.codec.value_tables
    return Args(
        query=query.data_ptr(), rope=rope.data_ptr(), pages=request.pages.data_ptr(),
        block_table=request.block_table.data_ptr(), seq_lens=request.seq_lens.data_ptr(),
        cu_seqlens_q=request.cu_seqlens_q.data_ptr(), latent_levels=latent.levels.data_ptr(),
        rope_levels=rope_tables.levels.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), parts=workspace.data_ptr(),
        states=workspace.data_ptr() + 2 * partial_rows * spec.key_dim,
        tiles=workspace.data_ptr() + partial_rows * (2 * spec.key_dim + 8),
        query_stride=query.stride(0), query_head_stride=query.stride(1), rope_stride=rope.stride(0),
        rope_head_stride=rope.stride(1), page_stride=request.pages.stride(0),
        table_stride=request.block_table.stride(0), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, rope_norm=rope_tables.orthonormal,
        table=(*level_bytes(spec.key, spec.key_dim), 0x80808080),
        rope_sign_bits=sign_words(spec.value_dim, spec.seed),
        num_heads=query.shape[1],
    )  # fmt: skip
