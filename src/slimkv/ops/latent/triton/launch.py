"""attend_latent with Triton: chooses block shapes and num_splits; launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from slimkv.ops.attention.api import MIN_TRITON_HEAD_DIM
from slimkv.ops.attention.triton.launch import Shape, choose_splits, merge_parts, part_views
from slimkv.ops.cuda.constants import LOG2E
from slimkv.ops.latent.api import LatentRequest
from slimkv.ops.latent.triton.decode import attend_latent_kernel
from slimkv.ops.triton.side import PLAIN_ROWS, side_of
from slimkv.spec import PageLayout

_LARGEST_DIM = 512


def supports(request: LatentRequest) -> str | None:
    """Supports all formats, any number of heads, latents and rope parts of 32 to 512, blocks of at least a tile."""
    spec = request.layout.spec
    if request.layout.plain_rows:
        return PLAIN_ROWS
    if min(spec.key_dim, spec.value_dim) < MIN_TRITON_HEAD_DIM or max(spec.key_dim, spec.value_dim) > _LARGEST_DIM:
        return (
            f"it takes latents and rope parts of {MIN_TRITON_HEAD_DIM} to {_LARGEST_DIM}, not {spec.key_dim} and "
            f"{spec.value_dim}; use backend='reference'"
        )
    return None


def launch_shape(layout: PageLayout, rows: int) -> Shape:
    """The block shape for sequences of up to ``rows`` (query, head) pairs, limited by registers."""
    tiles = 1 if layout.spec.key.bits == 32 else 2  # a float32 product is three tf32 products
    few = rows <= 16
    return Shape(16 if few else 32, tiles, warps=4 if few else 8, resident=2)


def run(request: LatentRequest) -> None:
    """See ``slimkv.ops.attend_latent``: one launch, and one to merge if the tokens are split."""
    query, out, layout, spec = request.query_latent, request.out, request.layout, request.layout.spec
    total, heads = query.shape[:2]
    sequences = request.seq_lens.shape[0]
    if total == 0 or request.max_query_len == 0:
        return
    shape = launch_shape(layout, request.max_query_len * heads)
    row_tiles = triton.cdiv(request.max_query_len * heads, shape.rows)
    num_splits = request.num_splits or choose_splits(sequences * row_tiles, request.max_seq_len, shape, query.device)
    into: tuple[Tensor, Tensor | None] = out, request.lse
    if num_splits > 1:
        into = part, part_lse = part_views(request.workspace, total * heads, spec.key_dim, num_splits, query.device)
    rope = request.stored_query_rope
    k, v = request.codec.key_tables, request.codec.value_tables
    attend_latent_kernel[(sequences * row_tiles, num_splits)](
        query, rope, request.pages, request.block_table, request.seq_lens, request.cu_seqlens_q, *into, k.levels,
        v.levels, row_tiles, heads, request.pages.shape[0], query.stride(0), query.stride(1), rope.stride(0),
        rope.stride(1), request.pages.stride(0), request.block_table.stride(0), out.stride(0), out.stride(1),
        request.softmax_scale * LOG2E, M=shape.rows, NT=shape.tiles, SPLITS=num_splits,
        EXACT=rope.dtype == torch.bfloat16, K=side_of(layout.key), V=side_of(layout.value), num_warps=shape.warps,
    )  # fmt: skip
    if num_splits > 1:
        merge_parts(part, part_lse, request.cu_seqlens_q, out, request.lse, num_splits)
