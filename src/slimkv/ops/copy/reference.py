"""copy in plain torch: one indexed read or write through the layout's byte offsets."""

from __future__ import annotations

import torch

from slimkv.codec.pack import page_tables
from slimkv.ops.checks import check_slot_range
from slimkv.ops.copy.api import CopyRequest


def supports(request: CopyRequest) -> str | None:
    """Everything."""
    return None


def run(request: CopyRequest) -> None:
    """See ``slimkv.ops.copy.api``."""
    check_slot_range("slots", request.slots, request.pages, request.layout)
    pages, layout = request.pages, request.layout
    kept = (request.slots >= 0).nonzero().flatten()
    slots = request.slots[kept].long()
    offsets = page_tables(layout, pages.device).byte_offsets[slots % layout.block_size]  # [tokens, row_bytes]
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    where = (slots // layout.block_size)[:, None, None], heads, offsets[:, None, :]
    if request.to_pages:
        pages[where] = request.rows[kept]
    else:
        request.rows[kept] = pages[where]
