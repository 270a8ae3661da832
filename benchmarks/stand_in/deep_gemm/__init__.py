"""A Triton stand-in for the DeepGEMM functions of vLLM's sparse-attention indexer, for vLLM builds without DeepGEMM.

The logit of a query and a key is the sum over the indexer's heads of ``weight * relu(query . key)``, times the key's
scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit
def _numbers(x):
    return x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def _logits(
    q, k, s, w, out, first, last, table, table_stride, k_stride, s_stride, out_stride, queries, H: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    begin = tl.load(first + row) if PAGE == 0 else 0
    end = tl.load(last + row)
    if (tile + 1) * N <= begin or tile * N >= end:
        return
    n = tile * N + tl.arange(0, N)
    ok = n < end
    if PAGE:
        page = tl.load(table + (row // queries) * table_stride + n // PAGE, mask=ok, other=0).to(tl.int64)
        at, scale_at = page * k_stride + (n % PAGE) * D, page * s_stride + n % PAGE
    else:
        at, scale_at = n.to(tl.int64) * D, n.to(tl.int64)
    d, h = tl.arange(0, D), tl.arange(0, H)
    keys = tl.load(k + at[:, None] + d[None, :], mask=ok[:, None], other=0)
    query = tl.load(q + row.to(tl.int64) * (H * D) + h[:, None] * D + d[None, :])
    x = tl.maximum(tl.dot(_numbers(query), tl.trans(_numbers(keys))), 0.0) * tl.load(w + row * H + h)[:, None]
    scale = tl.load(s + scale_at, mask=ok, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + n, tl.sum(x, 0) * scale, mask=ok)


def _output(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(rows, triton.cdiv(columns, 256) * 256, dtype=torch.float32, device=device)


def fp8_fp4_mqa_logits(
    q: Any, kv: Any, weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, clean_logits: bool = False
) -> Tensor:
    """Queries e4m3 [rows, heads, dim] and keys e4m3 [tokens, dim] with scales [tokens] -> [rows, tokens]."""
    query, (keys, scales) = q[0].contiguous(), kv
    out = _output(len(query), len(keys), query.device)
    _logits[(len(query), triton.cdiv(len(keys), TILE))](
        query.view(torch.uint8), keys.view(torch.uint8), scales, weights.float().contiguous(), out, cu_seqlen_ks,
        cu_seqlen_ke, cu_seqlen_ks, 0, 0, 0, out.stride(0), 1, H=query.shape[1], D=query.shape[2], N=TILE, PAGE=0,
    )  # fmt: skip
    return out[:, : len(keys)]


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_size: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """An empty schedule: this stand-in does not need DeepGEMM's."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_fp4_paged_mqa_logits(
    q: Any,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule: Tensor,
    max_model_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Queries e4m3 [batch, queries, heads, dim], cache uint8 [blocks, tokens, 1, dim + 4] -> [rows, max_model_len].

    A block holds the keys of all its tokens, followed by their float32 scales.
    """
    query = q[0].contiguous()
    batch, queries, heads, dim = query.shape
    blocks, size = kv_cache.shape[:2]
    stride = kv_cache.stride(0)
    keys = torch.as_strided(kv_cache, (blocks, stride), (stride, 1))
    floats = kv_cache.view(torch.float32)
    scales = torch.as_strided(floats, (blocks,), (stride // 4,), floats.storage_offset() + size * dim // 4)
    out = _output(batch * queries, max_model_len, query.device)
    ends = context_lens.reshape(-1)
    if ends.numel() != batch * queries:
        ends = (ends[:, None] - queries + 1 + torch.arange(queries, device=ends.device, dtype=ends.dtype)).reshape(-1)
    tiles = triton.cdiv(min(max_model_len, block_tables.shape[1] * size), TILE)
    _logits[(batch * queries, tiles)](
        query.view(torch.uint8), keys, scales, weights.float().contiguous(), out, ends, ends.contiguous(), block_tables,
        block_tables.stride(0), stride, stride // 4, out.stride(0), queries, H=heads, D=dim, N=TILE, PAGE=size,
    )  # fmt: skip
    return out[:, :max_model_len]


def get_num_sms() -> int:
    """Multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count
