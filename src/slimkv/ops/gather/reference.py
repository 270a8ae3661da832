"""gather in plain torch: reads the codes and fields of each token and decodes them."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.pack import take_tokens
from slimkv.ops.checks import check_slot_range
from slimkv.ops.gather.api import GatherRequest
from slimkv.spec import PageLayout


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather_kv``."""
    check_slot_range("slots", request.slots, request.pages, request.layout)
    key, value = decode_slots(
        request.pages, request.slots.clamp(min=0).long(), request.codec, request.layout, request.rotated
    )
    absent = (request.slots < 0)[:, None, None]
    request.key.copy_(torch.where(absent, 0, key))
    request.value.copy_(torch.where(absent, 0, value))


def decode_slots(
    pages: Tensor, slots: Tensor, codec: Codec, layout: PageLayout, rotated: bool
) -> tuple[Tensor, Tensor]:
    """The tokens in ``slots``, int64 [tokens] >= 0: K and V [tokens, num_kv_heads, dim], float32 or the raw dtype."""
    key, value = take_tokens(layout, pages, slots)
    return codec.decode_key(key, rotated=rotated), codec.decode_value(value, rotated=rotated)
