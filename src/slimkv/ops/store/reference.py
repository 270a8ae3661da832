"""store in plain torch: encode, pack, write each token's row."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec.pack import pack_rows, page_tables
from slimkv.ops.store.api import StoreRequest


def supports(request: StoreRequest) -> str | None:
    """Everything."""
    return None


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store.store``."""
    keep = request.slot_mapping >= 0
    slots = request.slot_mapping[keep].long()
    key = request.codec.encode_key(request.key[keep], query_aware=request.query_aware)
    value = request.codec.encode_value(request.value[keep])
    write_rows(request, pack_rows(request.layout, key, value), slots)


def write_rows(request: StoreRequest, rows: Tensor, slots: Tensor) -> None:
    """rows uint8 [tokens, num_kv_heads, row_bytes] -> the bytes of slots [tokens]."""
    tokens = request.layout.block_size
    offsets = page_tables(request.layout, request.pages.device).byte_offsets[slots % tokens]
    heads = torch.arange(request.pages.shape[1], device=slots.device)
    request.pages[(slots // tokens)[:, None, None], heads[None, :, None], offsets[:, None, :]] = rows
