"""Conversion of whole blocks of encoded tokens to pages and back."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec.pack import pack_rows, page_tables, take_tokens
from slimkv.codec.quantize import Encoded
from slimkv.spec import PageLayout


def pack_block(layout: PageLayout, key: Encoded, value: Encoded) -> Tensor:
    """The first n <= block_size tokens of blocks, [..., n, dim] -> uint8 [..., page_bytes]; other bytes are zero."""
    rows = pack_rows(layout, key, value)
    offsets = page_tables(layout, rows.device).byte_offsets[: rows.shape[-2]]
    page = rows.new_zeros(*rows.shape[:-2], layout.page_bytes)
    page[..., offsets.reshape(-1)] = rows.flatten(-2)
    return page


def unpack_block(layout: PageLayout, pages: Tensor) -> tuple[Encoded, Encoded]:
    """Pages uint8 [..., page_bytes] -> K and V [..., block_size, dim]."""
    flat = pages.reshape(1, pages.numel() // layout.page_bytes, layout.page_bytes)

    def shaped(x: Encoded) -> Encoded:  # [block_size, pages, dim]
        return Encoded(*(y.transpose(0, 1).reshape(*pages.shape[:-1], *y.shape[::2]) for y in (x.codes, x.fields)))

    key, value = take_tokens(layout, flat, torch.arange(layout.block_size))
    return shaped(key), shaped(value)
