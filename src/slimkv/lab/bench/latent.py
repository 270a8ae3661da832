"""Baselines of ``attend_latent`` (MLA) on unquantised and fp8 latents, if vLLM is installed.

FlashMLA and FlashAttention-3's latent attention are called as vLLM's backends FLASHMLA and FLASH_ATTN_MLA call them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.lab.bench.baselines import Candidates, flash_attention_3
from slimkv.lab.bench.cells import AttendCell

_FLASHMLA_PAGE = 64


def _dense(cell: AttendCell, device: torch.device, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries [batch, queries, heads, 576], a cache [blocks, page, 1, 576], its table, lengths and row starts."""
    width = cell.head_dim + cell.rope_dim
    count = -(-cell.context // page)
    query = torch.randn(cell.batch, cell.queries, cell.num_heads, width, device=device, dtype=torch.bfloat16)
    cache = torch.randn(cell.batch * count, page, 1, width, device=device, dtype=torch.bfloat16)
    table = torch.randperm(cell.batch * count, device=device).to(torch.int32).view(cell.batch, count)
    lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
    return query, cache, table, lens, starts


def flashmla(cell: AttendCell, device: torch.device, fp8: bool) -> Candidates:
    """vLLM's FLASHMLA decode, in its pages of 64."""
    from vllm.v1.attention.ops import flashmla as module

    supported, reason = module.is_flashmla_dense_supported()
    if not supported:
        raise UnsupportedError(reason or "FlashMLA does not run here")
    query, cache, table, lens, _ = _dense(cell, device, _FLASHMLA_PAGE)
    rows = cell.queries * cell.num_heads
    if fp8:
        scheduled = module.get_mla_metadata_dense_fp8(lens, rows, 1)
        one = torch.ones(1, device=device)
        call = functools.partial(
            module.flash_mla_with_kvcache_fp8, q=query.to(torch.float8_e4m3fn), k_cache=cache.to(torch.float8_e4m3fn),
            block_table=table, cache_seqlens=lens, head_dim_v=cell.head_dim, tile_scheduler_metadata=scheduled[0],
            num_splits=scheduled[1], softmax_scale=cell.softmax_scale, causal=True, descale_q=one, descale_k=one,
        )  # fmt: skip
        yield f"pages of {_FLASHMLA_PAGE}, fp8", call
        return
    schedule, _ = module.get_mla_metadata(lens, rows, 1, is_fp8_kvcache=False)
    yield (
        f"pages of {_FLASHMLA_PAGE}, bf16",
        functools.partial(
            module.flash_mla_with_kvcache, q=query, k_cache=cache, block_table=table, cache_seqlens=lens,
            head_dim_v=cell.head_dim, tile_scheduler_metadata=schedule, softmax_scale=cell.softmax_scale, causal=True,
            is_fp8_kvcache=False,
        ),
    )  # fmt: skip


def flash_attention_latent(cell: AttendCell, device: torch.device) -> Candidates:
    """vLLM's FLASH_ATTN_MLA decode: FlashAttention-3 with the latent as values and as part of the keys."""
    module = flash_attention_3()
    for page in (16, 64):
        query, cache, table, lens, starts = _dense(cell, device, page)
        latent, rope = query.flatten(0, 1).split([cell.head_dim, cell.rope_dim], -1)
        for num_splits in (0, 32):
            schedule = None
            if num_splits:
                schedule = module.get_scheduler_metadata(
                    cell.batch, cell.queries, cell.context, cell.num_heads, 1, cell.rope_dim, lens,
                    qkv_dtype=query.dtype, headdim_v=cell.head_dim, cu_seqlens_q=starts, page_size=page, causal=True,
                    num_splits=num_splits,
                )  # fmt: skip
            call = functools.partial(
                module.flash_attn_varlen_func, rope, cache[..., cell.head_dim :], cache[..., : cell.head_dim],
                cell.queries, starts, cell.context, q_v=latent, seqused_k=lens, block_table=table,
                softmax_scale=cell.softmax_scale, causal=True, fa_version=3, scheduler_metadata=schedule,
                num_splits=num_splits,
            )  # fmt: skip
            yield f"pages of {page}, " + (f"schedule of up to {num_splits}" if num_splits else "own splits"), call
