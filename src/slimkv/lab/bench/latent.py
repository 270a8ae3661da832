"""Cells of ``attend_latent`` (MLA): their tensors and baselines.

Baselines are FlashMLA (bf16 and fp8) and FlashAttention-3's latent attention, as vLLM's backends FLASHMLA and
FLASH_ATTN_MLA call them, if vLLM is installed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.errors import UnsupportedError
from slimkv.lab.bench.baselines import Candidates, compute_dtype, flash_attention_3
from slimkv.lab.bench.cells import AttendCell
from slimkv.spec import LatentSpec, PageLayout

_CHUNK = 65536  # tokens stored at a time
_FLASHMLA_PAGE = 64


@dataclass(frozen=True)
class LatentCell(AttendCell):
    """A cell whose ``num_heads`` heads share one latent of ``head_dim`` numbers and a rope part of ``rope_dim``."""

    num_heads: int = 16
    num_kv_heads: int = 1
    head_dim: int = 512
    rope_dim: int = 64
    format: str = "c4"

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        return PageLayout(LatentSpec.parse(self.format, self.head_dim, self.rope_dim), self.page)

    @property
    def softmax_scale(self) -> float:
        """The scale for heads of size 128 + 64 before absorption."""
        return 1 / math.sqrt(128 + self.rope_dim)

    def dense_bytes(self, element_bytes: int) -> int:
        """Bytes of the same latents as plain tensors."""
        return self.read_tokens * (self.head_dim + self.rope_dim) * element_bytes

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products under a causal mask."""
        visible = sum(self.queries * (length - (self.queries - 1) / 2) for length in self.lengths)
        return 2.0 * self.num_heads * (2 * self.head_dim + self.rope_dim) * visible

    @property
    def compute_bound(self) -> bool:
        """Whether the cell is compute-bound."""
        return self.num_heads * self.queries >= 64


_BIG = LatentCell("", batch=32, context=32768)
LATENT_CELLS = (
    replace(_BIG, name="mla-16h-32x32K"),
    replace(_BIG, name="mla-16h-8x128K", batch=8, context=131072),
    replace(_BIG, name="mla-20h-24x20K", num_heads=20, batch=24, context=20480),
    replace(_BIG, name="mla-32h-16x40K", num_heads=32, batch=16, context=40960),
    replace(_BIG, name="mla-16h-verify-2q-40x12K", queries=2, batch=40, context=12288),
    replace(_BIG, name="mla-64h-32x16K", num_heads=64, context=16384),
    replace(_BIG, name="mla-128h-32x16K", num_heads=128, context=16384),
    replace(_BIG, name="mla-8h-32x32K", num_heads=8),
    replace(_BIG, name="mla-16h-32x32K-c4r8", format="c4r8"),
    replace(_BIG, name="mla-16h-8x128K-c4r8", batch=8, context=131072, format="c4r8"),
    replace(_BIG, name="mla-64h-32x16K-c4r8", num_heads=64, context=16384, format="c4r8"),
    replace(_BIG, name="mla-128h-32x16K-c4r8", num_heads=128, context=16384, format="c4r8"),
    replace(_BIG, name="mla-16h-32x32K-c6r8", format="c6r8"),
    replace(_BIG, name="mla-16h-128x4K", batch=128, context=4096),
    replace(_BIG, name="mla-16h-1x128K", batch=1, context=131072),
    replace(_BIG, name="mla-16h-verify-4q-32x32K", queries=4),
    replace(_BIG, name="mla-16h-ragged-64x256-64K", batch=64, context=65536, shortest=256),
)
_SMALL = LatentCell("", batch=2, context=512, num_heads=4, head_dim=128, rope_dim=32, page=16)
SMALL_LATENT_CELLS = (
    replace(_SMALL, name="mla-4h-2x512"),
    replace(_SMALL, name="mla-4h-2x512-c4r8", format="c4r8"),
    replace(_SMALL, name="mla-4h-verify-2q-2x512", queries=2),
)


@dataclass(frozen=True)
class LatentCase:
    """A cell with its tensors. The blocks of a sequence are in random order; queries are in the stored space."""

    cell: LatentCell
    backend: str
    kv: ops.PackedKV
    batch: ops.AttentionBatch
    query_latent: Tensor
    query_rope: Tensor

    @classmethod
    def create(
        cls, cell: LatentCell, backend: str, device: torch.device, compile_only: bool = False
    ) -> LatentCase:  # fmt: skip
        """Stores random latents. With ``compile_only`` all sequences share a few blocks: every kernel, little work."""
        dtype = compute_dtype(device)
        spec = cell.layout.spec.with_raw_dtype(str(dtype).removeprefix("torch."))
        layout = PageLayout(spec, cell.page)
        per_sequence = layout.blocks_for(cell.context)
        total, chunk = cell.batch * per_sequence, min(_CHUNK, cell.batch * cell.context) // cell.page
        if compile_only:
            total = chunk
            table = torch.zeros(cell.batch, per_sequence, dtype=torch.int32, device=device)
        else:
            table = torch.randperm(total, device=device).to(torch.int32).view(cell.batch, per_sequence)
        pages = torch.empty(total, layout.page_bytes, dtype=torch.uint8, device=device)
        kv = ops.PackedKV(pages, Codec(spec, device), layout)
        for first in range(0, total, chunk):
            count = min(chunk, total - first) * cell.page
            slots = first * cell.page + torch.arange(count, device=device)
            latent = torch.randn(count, cell.head_dim, device=device, dtype=dtype)
            rope = torch.randn(count, cell.rope_dim, device=device, dtype=dtype)
            ops.store_latent(latent, rope, kv, slots)
        rows = cell.batch * cell.queries
        starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
        lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
        return cls(
            cell=cell, backend=backend, kv=kv,
            batch=ops.AttentionBatch(table, lens, starts, cell.queries, cell.context),
            query_latent=torch.randn(rows, cell.num_heads, cell.head_dim, device=device, dtype=dtype),
            query_rope=torch.randn(rows, cell.num_heads, cell.rope_dim, device=device, dtype=dtype),
        )  # fmt: skip

    def attend(self) -> Tensor:
        """The timed call."""
        return ops.attend_latent(
            self.query_latent, self.query_rope, self.kv, self.batch, softmax_scale=self.cell.softmax_scale,
            query_is_rotated=True, output_is_rotated=True, backend=self.backend,
        )  # fmt: skip

    def error(self) -> float:
        """Relative error of the first sequence's queries against float64 on the same codes."""
        cell = self.cell
        position = torch.arange(cell.context, device=self.kv.pages.device)
        slots = self.batch.block_table[0, position // cell.page].long() * cell.page + position % cell.page
        latent, _ = ops.gather_latent(self.kv, slots, rotated=True)
        _, rope = ops.gather_latent(self.kv, slots)
        scores = torch.einsum("qhd,kd->qhk", self.query_latent[: cell.queries].double(), latent.double())
        scores += torch.einsum("qhd,kd->qhk", self.query_rope[: cell.queries].double(), rope.double())
        last = torch.arange(cell.context - cell.queries, cell.context, device=slots.device)
        scores = (scores * cell.softmax_scale).masked_fill((position[None] > last[:, None])[:, None], -torch.inf)
        exact = torch.einsum("qhk,kd->qhd", scores.softmax(-1), latent.double())
        return float((self.attend()[: cell.queries].double() - exact).norm() / exact.norm())


# -- baselines ---------------------------------------------------------------------------------------------------------


def _dense(cell: LatentCell, device: torch.device, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries [batch, queries, heads, 576], a cache [blocks, page, 1, 576], its table, lengths and row starts."""
    width = cell.head_dim + cell.rope_dim
    count = -(-cell.context // page)
    query = torch.randn(cell.batch, cell.queries, cell.num_heads, width, device=device, dtype=torch.bfloat16)
    cache = torch.randn(cell.batch * count, page, 1, width, device=device, dtype=torch.bfloat16)
    table = torch.randperm(cell.batch * count, device=device).to(torch.int32).view(cell.batch, count)
    lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
    return query, cache, table, lens, starts


def flashmla(cell: LatentCell, device: torch.device, fp8: bool) -> Candidates:
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


def flash_attention_latent(cell: LatentCell, device: torch.device) -> Candidates:
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
