"""copy in one Triton launch: a program copies the row of one token and head through a table of byte offsets."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimkv.codec.pack import page_tables
from slimkv.ops.copy.api import CopyRequest
from slimkv.spec import PageLayout


@triton.jit
def copy_kernel(
    pages_ptr, slots_ptr, rows_ptr, offsets_ptr, page_stride, page_head_stride, row_stride, row_head_stride,
    BLOCK_SIZE: tl.constexpr, ROW_BYTES: tl.constexpr, ROW_PADDED: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """rows [tokens, heads, ROW_BYTES] to or from the slots; a negative slot is skipped."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        byte = tl.arange(0, ROW_PADDED)
        own = byte < ROW_BYTES
        offset = tl.load(offsets_ptr + slot % BLOCK_SIZE * ROW_BYTES + byte, mask=own, other=0)
        page = pages_ptr + slot // BLOCK_SIZE * page_stride + head * page_head_stride
        row = rows_ptr + token.to(tl.int64) * row_stride + head * row_head_stride
        if TO_PAGES:
            tl.store(page + offset, tl.load(row + byte, mask=own, other=0), mask=own)
        else:
            tl.store(row + byte, tl.load(page + offset, mask=own, other=0), mask=own)


@lru_cache(maxsize=256)
def _offsets(layout: PageLayout, device: torch.device) -> Tensor:
    """int32 [block_size, row_bytes]: the page offset of each byte of a token's row."""
    return page_tables(layout, device).byte_offsets.to(torch.int32).contiguous()


def run(request: CopyRequest) -> None:
    """See ``slimkv.ops.copy.api``: one launch."""
    pages, rows = request.pages, request.rows
    width = rows.shape[2]
    copy_kernel[(rows.shape[0], rows.shape[1])](
        pages, request.slots, rows, _offsets(request.layout, pages.device),
        pages.stride(0), pages.stride(1), rows.stride(0), rows.stride(1),
        BLOCK_SIZE=request.layout.block_size, ROW_BYTES=width, ROW_PADDED=triton.next_power_of_2(width),
        TO_PAGES=request.to_pages, num_warps=4,
    )  # fmt: skip
