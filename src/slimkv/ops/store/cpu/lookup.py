"""store on a CPU: as the reference, but K and V of one format are encoded in one go, which halves the small steps."""

from __future__ import annotations

import torch

from slimkv.codec.pack import pack_rows
from slimkv.codec.quantize import Encoded
from slimkv.ops.checks import check_slot_range
from slimkv.ops.store.api import StoreRequest
from slimkv.ops.store.reference import encode_keys, write_rows


def supports(request: StoreRequest) -> str | None:
    """Everything."""
    return None


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store.store``."""
    check_slot_range("slot_mapping", request.slot_mapping, request.pages, request.layout)
    key, value, slots = request.key, request.value, request.slot_mapping
    keep = slots >= 0
    if not bool(keep.all()):
        key, value, slots = key[keep], value[keep], slots[keep]
    spec, tokens = request.layout.spec, key.shape[0]
    alike = spec.key == spec.value and spec.key_dim == spec.value_dim and key.dtype == value.dtype
    if alike and request.query_aware is None:
        both = request.codec.encode_key(torch.cat([key, value]))
        encoded_key = Encoded(both.codes[:tokens], both.fields[:tokens])
        encoded_value = Encoded(both.codes[tokens:], both.fields[tokens:])
    else:
        encoded_key = encode_keys(request, key, keep)
        encoded_value = request.codec.encode_value(value)
    write_rows(request, pack_rows(request.layout, encoded_key, encoded_value), slots.long())
