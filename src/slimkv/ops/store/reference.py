"""store in plain torch: encodes tokens, packs them and writes their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec.pack import pack_rows, token_bytes
from slimkv.codec.quantize import Encoded
from slimkv.ops.checks import check_slot_range
from slimkv.ops.store.api import StoreRequest


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store_kv``."""
    check_slot_range("slot_mapping", request.slot_mapping, request.pages, request.layout)
    keep = request.slot_mapping >= 0
    slots = request.slot_mapping[keep].long()
    key = encode_keys(request, request.key[keep], keep)
    value = request.codec.encode_value(request.value[keep])
    where = token_bytes(request.layout, request.pages, slots)
    request.pages[where] = pack_rows(request.layout, key, value)


def encode_keys(request: StoreRequest, key: Tensor, keep: Tensor) -> Encoded:
    """Encodes keys [tokens, num_kv_heads, key_dim], the tokens ``keep`` (bool) of a request, each with its matrix."""
    matrices, index = request.query_aware, request.query_aware_index
    if matrices is None or matrices.ndim == 3:
        return request.codec.encode_key(key, query_aware=matrices)
    if index is None:
        return request.codec.encode_key(key, query_aware=matrices[0])
    index = index[keep].clamp(0, len(matrices) - 1)
    codes, fields = [], []
    order = index.argsort(stable=True)
    numbers, counts = index.unique(return_counts=True)  # ascending, as in ``order``
    for number, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
        encoded = request.codec.encode_key(key[rows], query_aware=matrices[number])
        codes.append(encoded.codes)
        fields.append(encoded.fields)
    if not codes:
        return request.codec.encode_key(key, query_aware=matrices[0])
    back = order.argsort()
    return Encoded(torch.cat(codes)[back], torch.cat(fields)[back])
