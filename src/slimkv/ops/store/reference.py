"""store in plain torch: encode, pack, write each token's row."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec.pack import pack_rows, page_tables
from slimkv.codec.quantize import Encoded
from slimkv.ops.checks import check_slot_range
from slimkv.ops.store.api import StoreRequest


def supports(request: StoreRequest) -> str | None:
    """Everything."""
    return None


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store.store``."""
    check_slot_range("slot_mapping", request.slot_mapping, request.pages, request.layout)
    keep = request.slot_mapping >= 0
    slots = request.slot_mapping[keep].long()
    key = encode_keys(request, request.key[keep], keep)
    value = request.codec.encode_value(request.value[keep])
    write_rows(request, pack_rows(request.layout, key, value), slots)


def encode_keys(request: StoreRequest, key: Tensor, keep: Tensor) -> Encoded:
    """The keys [tokens, num_kv_heads, key_dim] of the rows ``keep`` (bool) of a request, each with its own matrix."""
    matrices, index = request.query_aware, request.query_aware_index
    if matrices is None or matrices.ndim == 3:
        return request.codec.encode_key(key, query_aware=matrices)
    if index is None:
        return request.codec.encode_key(key, query_aware=matrices[0])
    index = index[keep].clamp(0, len(matrices) - 1)
    codes, fields = [], []
    order = index.argsort(stable=True)
    numbers, counts = index.unique(return_counts=True)  # ascending, as the order
    for number, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
        encoded = request.codec.encode_key(key[rows], query_aware=matrices[number])
        codes.append(encoded.codes)
        fields.append(encoded.fields)
    if not codes:
        return request.codec.encode_key(key, query_aware=matrices[0])
    back = order.argsort()
    return Encoded(torch.cat(codes)[back], torch.cat(fields)[back])


def write_rows(request: StoreRequest, rows: Tensor, slots: Tensor) -> None:
    """rows uint8 [tokens, num_kv_heads, row_bytes] -> the bytes of slots [tokens]."""
    tokens = request.layout.block_size
    offsets = page_tables(request.layout, request.pages.device).byte_offsets[slots % tokens]
    heads = torch.arange(request.pages.shape[1], device=slots.device)
    request.pages[(slots // tokens)[:, None, None], heads[None, :, None], offsets[:, None, :]] = rows
