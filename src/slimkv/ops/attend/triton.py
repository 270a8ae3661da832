"""attend with Triton: chooses block shapes and splits, launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from slimkv.codec.codebook import codebook
from slimkv.errors import InputError
from slimkv.ops.attend import AttendRequest
from slimkv.ops.attend.kernels import attend_kernel, merge_kernel
from slimkv.ops.unpack import KIND_NUMBER, byte_table
from slimkv.spec import Kind, PageLayout, TensorFormat

_LOG2E = math.log2(math.e)
_MAX_SPLITS = 256


@dataclass(frozen=True)
class Shape:
    """The block shape of one launch."""

    rows: int  # query rows of a program: queries x heads of a group, padded
    queries: int  # queries of a program
    tiles: int  # 16-token tiles per step
    warps: int
    stages: int
    rotate_block: int


def supports(request: AttendRequest) -> str | None:
    """Every format and head size up to 512; blocks of at least a tile; up to 128 query heads per KV head."""
    spec = request.layout.spec
    if request.layout.block_tokens == 1:
        return "blocks of 1 token (plain rows) are not read by the kernels; use blocks of 16 or more, or impl='reference'"
    if max(spec.key_dim, spec.value_dim) > 512:
        return f"head sizes {spec.key_dim}/{spec.value_dim} are beyond the 512 that fit a program's registers; use impl='reference'"
    if request.group > 128:
        return f"{request.group} query heads per KV head are more than 128; use impl='reference'"
    if (spec.key.kind == Kind.RAW) != (spec.value.kind == Kind.RAW) and request.fresh is not None:
        return "fresh K/V beside a cache that is raw on one side only; use impl='reference'"
    return None


def launch_shape(layout: PageLayout, group: int, max_query_len: int) -> Shape:
    """The block shape for queries of up to ``max_query_len`` tokens."""
    dim = max(layout.spec.key_dim, layout.spec.value_dim)
    rows = max_query_len * group
    least = max(16, triton.next_power_of_2(group))
    if rows <= 32 or least > 64:
        return Shape(least, least // group, 2 if dim <= 128 else 1, 1 if least == 16 else 4, 3, 16)
    if dim <= 128:
        rows = max(least, 128)
        return Shape(rows, rows // group, 4, 8, 2, 64)
    rows = max(least, 64)
    return Shape(rows, rows // group, 2, 4, 2, 32)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(programs: int, max_seq_len: int, shape: Shape, device: torch.device) -> int:
    """How many parts to cut the keys into so that about ten one-warp programs run on every multiprocessor, in one wave."""
    resident = 10 // shape.warps or 1
    steps = max(1, triton.cdiv(max_seq_len, 16 * shape.tiles))
    wanted = _multiprocessors(device) * resident // max(1, programs)
    return max(1, min(wanted, steps, _MAX_SPLITS))


def query_blocks(request: AttendRequest, shape: Shape) -> int:
    """Programs along the query axis: one per sequence, or an upper bound when sequences may need several."""
    sequences = request.seq_lens.shape[0]
    if request.max_query_len <= shape.queries:
        return sequences
    return request.query.shape[0] // shape.queries + sequences


def workspace_bytes(total_queries: int, query_heads: int, value_dim: int, splits: int) -> int:
    """Bytes ``attend`` needs for ``splits`` parts (0 when the keys are not split)."""
    return 0 if splits == 1 else 4 * total_queries * query_heads * splits * (value_dim + 1)


@lru_cache(maxsize=64)
def _byte_table(form: TensorFormat, dim: int) -> tuple[int, int]:
    if form.kind != Kind.LLOYD or form.bits > 4:
        return 0, 0
    return byte_table(codebook(form.bits, dim).levels_by_code.tolist(), form.bits)


def _fresh_in_stored_space(request: AttendRequest) -> tuple[torch.Tensor, torch.Tensor]:
    if request.fresh is None:
        return request.query, request.query
    spec, (key, value) = request.layout.spec, request.fresh
    if spec.key.rotated:
        key = (key.float() @ request.codec.key_rotation).to(torch.float16)
    if spec.value.rotated:
        value = (value.float() @ request.codec.value_rotation).to(torch.bfloat16)
    return key, value


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend.attend``: one launch, and a second one to merge when the keys are split."""
    total, heads = request.query.shape[:2]
    if total == 0 or request.max_query_len == 0:
        return
    layout, spec, options, query, out = request.layout, request.layout.spec, request.options, request.query, request.out
    kv_heads, device = request.pages.shape[1], query.device
    shape = launch_shape(layout, request.group, request.max_query_len)
    blocks = query_blocks(request, shape)
    longest = request.max_seq_len if options.window is None else min(request.max_seq_len, options.window + request.max_query_len)
    splits = request.splits or choose_splits(blocks * kv_heads, longest, shape, device)
    part, part_lse = _workspace(request, total, heads, splits)
    fresh_key, fresh_value = _fresh_in_stored_space(request)
    k, v = request.codec.key_tables, request.codec.value_tables
    sinks = options.sinks if options.sinks is not None else query
    lse = request.lse if request.lse is not None else part_lse
    key_side, value_side = layout.key, layout.value
    interpreted = triton.knobs.runtime.interpret
    attend_kernel[(blocks, kv_heads, splits)](
        query, request.pages, request.block_table, request.seq_lens, request.query_start, sinks, fresh_key, fresh_value,
        out, lse, part, part_lse,
        k.signs, v.signs, k.levels, v.levels, *_byte_table(spec.key, spec.key_dim), *_byte_table(spec.value, spec.value_dim),
        request.seq_lens.shape[0], query.stride(0), query.stride(1), request.pages.stride(0), request.pages.stride(1),
        request.block_table.stride(0), out.stride(0), out.stride(1),
        fresh_key.stride(0), fresh_key.stride(1), fresh_value.stride(0), fresh_value.stride(1),
        request.scale * _LOG2E, options.softcap * _LOG2E, k.orthonormal, v.orthonormal, options.window or 0,
        HEADS=kv_heads, GROUP=request.group, BLOCK_Q=shape.queries, M=shape.rows, NT=shape.tiles, SPLITS=splits,
        PAGE=layout.block_tokens, KD=spec.key_dim, VD=spec.value_dim,
        KS=triton.next_power_of_2(spec.key_dim // 16), VS=triton.next_power_of_2(spec.value_dim // 16),
        K_KIND=KIND_NUMBER[spec.key.kind], K_BITS=spec.key.bits, K_BF16=spec.key.raw_dtype == "bfloat16",
        K_ROTATED=spec.key.rotated, K_FIELDS=key_side.fields_offset,
        V_KIND=KIND_NUMBER[spec.value.kind], V_BITS=spec.value.bits, V_BF16=spec.value.raw_dtype == "bfloat16",
        V_ROTATED=spec.value.rotated, V_CODES=value_side.codes_offset, V_FIELDS=value_side.fields_offset,
        ONE_BLOCK=request.max_query_len <= shape.queries, CAUSAL=options.causal, WINDOW=options.window is not None,
        SOFTCAP=options.softcap > 0, SINKS=options.sinks is not None, FRESH=request.fresh is not None, LSE=request.lse is not None,
        PTX=not interpreted and torch.version.cuda is not None, ROTATE_BLOCK=shape.rotate_block, STAGES=shape.stages,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        rows = 16
        merge_kernel[(triton.cdiv(total * heads, rows),)](
            part, part_lse, request.query_start, sinks, out, lse, v.signs, v.orthonormal, request.seq_lens.shape[0],
            out.stride(0), out.stride(1),
            Q_HEADS=heads, ROWS=rows, SPLITS=splits, VD=spec.value_dim, VDP=16 * triton.next_power_of_2(spec.value_dim // 16),
            V_ROTATED=spec.value.rotated, SINKS=options.sinks is not None, LSE=request.lse is not None, num_warps=4,
        )  # fmt: skip


def _workspace(request: AttendRequest, total: int, heads: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 views: partial outputs and their log-sum-exps."""
    if splits == 1:
        return request.out, request.out
    need = workspace_bytes(total, heads, request.layout.spec.value_dim, splits)
    space = request.workspace
    if space is None:
        space = torch.empty(need, dtype=torch.uint8, device=request.query.device)
    elif space.dtype != torch.uint8 or space.numel() < need or not space.is_contiguous() or space.data_ptr() % 16:
        raise InputError(f"the workspace must be contiguous uint8 of at least {need} bytes, 16-byte aligned; it has {space.numel()}")
    numbers = space[:need].view(torch.float32)
    count = total * heads * splits * request.layout.spec.value_dim
    return numbers[:count], numbers[count:]
