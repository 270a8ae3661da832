"""attend with Triton: chooses block shapes, num_splits and passes; launches.

Sequences with few queries (decode, verification) attend to packed pages, with split-KV if there are too few programs to
fill the device. For sequences with many queries (prefill), keys and values are unpacked once. A mixed batch launches
both kernels; each skips the sequences of the other kernel, so the host does not need the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slimkv.ops.attention.api import (
    MAX_DECODE_QUERIES,
    MIN_TRITON_HEAD_DIM,
    NO_WINDOW,
    AttendRequest,
    refuses_eight_bit,
    split_workspace_bytes,
)
from slimkv.ops.attention.triton.decode import attend_kernel, merge_kernel
from slimkv.ops.attention.triton.prefill import prefill_kernel, range_kernel, unpack_kernel
from slimkv.ops.checks import workspace_of
from slimkv.ops.cuda.constants import LOG2E
from slimkv.ops.cuda.device import device_of
from slimkv.ops.triton.side import PLAIN_ROWS, side_of
from slimkv.spec import Kind, PageLayout, TensorFormat

_MAX_SPLITS = 256
PREFILL_BYTES = 256 << 20  # for unpacked K and V; a longer context takes several passes


@dataclass(frozen=True)
class Shape:
    """The block shape of one launch on packed pages."""

    rows: int  # query rows of a program: queries x heads, padded
    tiles: int  # 16-token tiles per step
    warps: int
    resident: int  # programs per multiprocessor at a time
    stages: int = 1


def supports(request: AttendRequest) -> str | None:
    """Supports all formats, head sizes of 32 to 512, blocks of at least a tile, up to 64 query heads per KV head."""
    spec = request.layout.spec
    if request.options.deterministic:
        return "its splits depend on the shape of the call, which deterministic attention does not allow"
    if reason := refuses_eight_bit(request):
        return reason
    if request.layout.block_size == 1:
        return PLAIN_ROWS
    if min(spec.key_dim, spec.value_dim) < MIN_TRITON_HEAD_DIM:
        # On a GPU, head size 16 gives wrong results for formats of odd widths; in the interpreter it is correct.
        return (
            f"head sizes {spec.key_dim}/{spec.value_dim} are below {MIN_TRITON_HEAD_DIM}; "
            "use backend='cuda' or 'reference'"
        )
    if max(spec.key_dim, spec.value_dim) > 512:
        return (
            f"head sizes {spec.key_dim}/{spec.value_dim} exceed the 512 that fit in registers; use backend='reference'"
        )
    if request.group > 64:
        return f"{request.group} query heads per KV head are more than 64; use backend='reference'"
    return None


def launch_shape(layout: PageLayout, group: int, max_query_len: int) -> Shape:
    """The block shape of the packed kernel for sequences of up to ``max_query_len`` queries."""
    dim = max(layout.spec.key_dim, layout.spec.value_dim)
    rows = max(8, triton.next_power_of_2(group))
    if max_query_len * group > 8:
        rows = max(16, rows)
    if rows > 16:
        return Shape(rows, 2 if dim <= 128 else 1, warps=2, resident=4)
    if dim <= 128:
        # With few bits a step is short, and prefetching pays; with more, registers are better spent on a longer step.
        short = layout.spec.key.bits + layout.spec.value.bits <= 4
        return Shape(rows, 4, warps=1, resident=12, stages=2) if short else Shape(rows, 4, warps=1, resident=8)
    return Shape(rows, 2 if dim <= 256 else 1, warps=1, resident=8)


def choose_splits(programs: int, max_seq_len: int, shape: Shape, device: torch.device) -> int:
    """The number of split-KV parts with which the programs fill the device in one wave."""
    steps = max(1, triton.cdiv(max_seq_len, 16 * shape.tiles))
    slots = device_of(device).multiprocessors * shape.resident
    return max(1, min(slots // max(1, programs), steps, _MAX_SPLITS))


Fresh = tuple[Tensor, Tensor] | tuple[None, None]


def _fresh_in_stored_space(request: AttendRequest) -> Fresh:
    """The fresh K and V in the stored space of the cache, contiguous."""
    if request.fresh is None:
        return None, None
    spec, (key, value) = request.layout.spec, request.fresh
    key = request.codec.rotate_query(key) if spec.key.rotated else key
    value = request.codec.rotate_value(value) if spec.value.rotated else value
    return key.contiguous(), value.contiguous()


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    total = request.query.shape[0]
    if total == 0 or request.max_query_len == 0:
        return
    fresh = _fresh_in_stored_space(request)
    spec = request.layout.spec
    if request.max_query_len <= MAX_DECODE_QUERIES or max(spec.key_dim, spec.value_dim) > 256:
        _attend_packed(request, fresh, request.max_query_len)
        return
    if request.min_query_len <= MAX_DECODE_QUERIES:  # the host only knows bounds: any sequence may have few queries
        _attend_packed(request, fresh, MAX_DECODE_QUERIES)
    attend_prefill(request, fresh)


def _attend_packed(request: AttendRequest, fresh: Fresh, most_queries: int) -> None:
    """Attention of up to ``most_queries`` queries per sequence: one launch, and one to merge if the keys are split."""
    total, heads = request.query.shape[:2]
    layout, spec, options, query, out = request.layout, request.layout.spec, request.options, request.query, request.out
    num_kv_heads, sequences = request.pages.shape[1], request.seq_lens.shape[0]
    shape = launch_shape(layout, request.group, most_queries)
    queries = shape.rows // request.group  # per program
    one_block = most_queries <= queries
    blocks = sequences if one_block else total // queries + sequences
    window = options.sliding_window
    longest = request.max_seq_len if window is None else min(request.max_seq_len, window + most_queries)
    num_splits = request.num_splits or choose_splits(blocks * num_kv_heads, longest, shape, query.device)
    if request.max_query_len > most_queries:  # merging would overwrite the rows of other sequences
        num_splits = 1
    into: tuple[Tensor, Tensor | None] = out, request.lse
    if num_splits > 1:
        into = part, part_lse = part_views(request.workspace, total * heads, spec.value_dim, num_splits, query.device)
    k, v = request.codec.key_tables, request.codec.value_tables
    attend_kernel[(blocks, num_kv_heads, num_splits)](
        query, request.pages, request.block_table, request.seq_lens, request.cu_seqlens_q, request.sinks,
        request.score_shift, *fresh, *into, *_rotations(request), k.levels, v.levels,
        sequences, most_queries, query.stride(0), query.stride(1), request.pages.stride(0), request.pages.stride(1),
        request.block_table.stride(0), out.stride(0), out.stride(1),
        request.softmax_scale * LOG2E, options.softcap * LOG2E, k.orthonormal, v.orthonormal,
        window or 0,
        K=side_of(layout.key), V=side_of(layout.value), HEADS=num_kv_heads, GROUP=request.group, M=shape.rows,
        NT=shape.tiles, SPLITS=num_splits, ONE_BLOCK=one_block, CAUSAL=options.causal, WINDOW=window is not None,
        SOFTCAP=options.softcap > 0, SINK_STRIDE=request.sink_stride, STAGES=shape.stages, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_parts(
            part, part_lse, request.cu_seqlens_q, out, request.lse, num_splits, request.sinks, request.sink_stride,
            _rotations(request)[1], v.orthonormal,
        )  # fmt: skip


def merge_parts(
    part: Tensor, part_lse: Tensor, cu_seqlens_q: Tensor, out: Tensor, lse: Tensor | None, num_splits: int,
    sinks: Tensor | None = None, sink_stride: int = 0, rotation: Tensor | None = None, norm: float = 1.0,
) -> None:  # fmt: skip
    """Merges the results of ``num_splits`` parts into out [total_queries, num_heads, dim] and lse: one launch."""
    total, heads, dim = out.shape
    rows, padded = 4 if total * heads >= 1024 else 1, triton.next_power_of_2(dim)
    merge_kernel[(triton.cdiv(total * heads, rows),)](
        part, part_lse, cu_seqlens_q, sinks, out, lse, rotation, norm, cu_seqlens_q.shape[0] - 1,
        out.stride(0), out.stride(1),
        Q_HEADS=heads, ROWS=rows, PARTS=min(16 // rows, triton.next_power_of_2(num_splits)), SPLITS=num_splits, VD=dim,
        VDP=padded, NB=min(128, padded) if rows == 4 else 32, SINK_STRIDE=sink_stride, num_warps=4,
    )  # fmt: skip


def _rotations(request: AttendRequest) -> tuple[Tensor | None, Tensor | None]:
    """The Hadamard matrices of K and V; None where a side is not rotated."""
    spec, codec = request.layout.spec, request.codec
    key, value = codec.key_tables.signs, codec.value_tables.signs
    return key if spec.key.rotated else None, value if spec.value.rotated else None


def part_views(
    space: Tensor | None, rows: int, dim: int, num_splits: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """float32 views of a workspace (None: a new one): partial outputs of (query, head) rows, and their log-sum-exps."""
    need = split_workspace_bytes(rows, 1, dim, num_splits)
    numbers = workspace_of(space, need, device)[:need].view(torch.float32)
    return numbers[: rows * num_splits * dim], numbers[rows * num_splits * dim :]


def _dense_dtype(fmt: TensorFormat) -> torch.dtype:
    """The dtype of unpacked numbers: that of a raw format, or fp16, which holds all others once they are scaled."""
    return getattr(torch, fmt.raw_dtype) if fmt.kind == Kind.RAW else torch.float16


def _dense_exponents(request: AttendRequest, fresh: Fresh) -> Tensor:
    """int32 [sequences, num_kv_heads, 2]: exponents that bound K and V; 6 for raw sides, which are not scaled."""
    spec, shape = request.layout.spec, (request.seq_lens.shape[0], request.pages.shape[1], 2)
    exponents = torch.full(shape, -39, dtype=torch.int32, device=request.query.device)
    for side, fmt in enumerate((spec.key, spec.value)):
        if fmt.kind == Kind.RAW:
            exponents[..., side] = 6
        elif (own := fresh[side]) is not None:
            real = torch.arange(own.shape[0], device=exponents.device) < request.cu_seqlens_q[-1]  # not padding
            top = torch.where(real, own.abs().amax((1, 2)).float(), 0.0).nan_to_num().amax()
            exponents[..., side] = torch.frexp(top)[1].clamp(min=-39)
    tokens = 1024
    range_kernel[(triton.cdiv(request.max_seq_len, tokens), *shape[1::-1])](
        request.pages, request.block_table, request.seq_lens, request.cu_seqlens_q, exponents, MAX_DECODE_QUERIES,
        request.options.sliding_window or NO_WINDOW, request.pages.stride(0), request.pages.stride(1),
        request.block_table.stride(0), HEADS=shape[1], TOKENS=tokens, K=side_of(request.layout.key),
        V=side_of(request.layout.value),
    )  # fmt: skip
    return exponents


def prefill_chunk(layout: PageLayout, num_kv_heads: int, sequences: int, max_seq_len: int) -> int:
    """Tokens per sequence and pass that the workspace of unpacked tokens holds: a multiple of 128."""
    spec = layout.spec
    per_token = num_kv_heads * (
        spec.key_dim * _dense_dtype(spec.key).itemsize + spec.value_dim * _dense_dtype(spec.value).itemsize
    )
    fit = PREFILL_BYTES // (per_token * sequences) // 128 * 128
    return max(128, min(fit, triton.cdiv(max_seq_len, 128) * 128))


def prefill_step(dim: int, itemsize: int, device: torch.device) -> tuple[int, int]:
    """Keys per step of the prefill kernel and its number of stages: as many as fit shared memory."""
    shared = 96 << 10
    if device.type == "cuda":
        shared = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    if itemsize == 4:  # a float32 product is three tf32 products, each with its own operands
        return 32, 1
    padded = triton.next_power_of_2(dim)
    for tokens, stages in ((128, 3), (64, 3), (64, 2), (32, 2)):
        if (2 * tokens * stages + 128) * padded * itemsize <= shared:
            return tokens, stages
    return 32, 1


def attend_prefill(request: AttendRequest, fresh: Fresh = (None, None)) -> None:
    """Attention of more than MAX_DECODE_QUERIES queries per sequence. Each pass is two launches: unpack, attend."""
    total, heads = request.query.shape[:2]
    layout, spec, options, query, out = request.layout, request.layout.spec, request.options, request.query, request.out
    num_kv_heads, sequences, device = request.pages.shape[1], request.seq_lens.shape[0], query.device
    most_long = min(sequences, total // (MAX_DECODE_QUERIES + 1))
    key_dtype, value_dtype = _dense_dtype(spec.key), _dense_dtype(spec.value)
    chunk = prefill_chunk(layout, num_kv_heads, most_long, request.max_seq_len)
    passes = triton.cdiv(request.max_seq_len, chunk)
    rank = ((request.cu_seqlens_q.diff() > MAX_DECODE_QUERIES).cumsum(0, dtype=torch.int32) - 1).to(torch.int32)
    dense_k = torch.empty(most_long, num_kv_heads, chunk, spec.key_dim, dtype=key_dtype, device=device)
    dense_v = torch.empty(most_long, num_kv_heads, chunk, spec.value_dim, dtype=value_dtype, device=device)
    state_floats = spec.value_dim + 2 if passes > 1 else 0
    state = torch.empty(total, heads, state_floats, dtype=torch.float32, device=device)
    k, v = request.codec.key_tables, request.codec.value_tables
    wide = max(spec.key_dim, spec.value_dim) > 128
    rows = max(64 if wide else 128, triton.next_power_of_2(request.group))
    tokens_per_step, stages = prefill_step(
        max(spec.key_dim, spec.value_dim), max(key_dtype.itemsize, value_dtype.itemsize), device
    )
    exponents = _dense_exponents(request, fresh)
    for step in range(passes):
        unpack_kernel[(triton.cdiv(chunk, 64), num_kv_heads, sequences)](
            request.pages, request.block_table, request.seq_lens, request.cu_seqlens_q, rank, exponents, *fresh,
            dense_k, dense_v, k.levels, v.levels, MAX_DECODE_QUERIES, options.sliding_window or NO_WINDOW, chunk,
            step * chunk, request.pages.stride(0), request.pages.stride(1), request.block_table.stride(0),
            HEADS=num_kv_heads, NT=4, K=side_of(layout.key), V=side_of(layout.value), num_warps=4,
        )  # fmt: skip
        prefill_kernel[(total // (rows // request.group) + sequences, num_kv_heads)](
            query, dense_k, dense_v, request.seq_lens, request.cu_seqlens_q, rank, exponents, request.sinks,
            request.score_shift, out, request.lse, state, *_rotations(request), sequences, MAX_DECODE_QUERIES, chunk,
            step * chunk, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            request.softmax_scale * LOG2E, options.softcap * LOG2E, k.orthonormal, v.orthonormal,
            options.sliding_window or 0,
            K=side_of(layout.key), V=side_of(layout.value), HEADS=num_kv_heads, GROUP=request.group, M=rows,
            BN=tokens_per_step, FIRST=step == 0, LAST=step == passes - 1, CAUSAL=options.causal,
            WINDOW=options.sliding_window is not None, SOFTCAP=options.softcap > 0, SINK_STRIDE=request.sink_stride,
            STAGES=stages, num_warps=4 if wide else 8, num_stages=stages,
        )  # fmt: skip
