"""gather on a CPU: the blocks that hold the slots, decoded whole by table lookup."""

from __future__ import annotations

import torch

from slimkv.ops.checks import check_slot_range
from slimkv.ops.cpu.block_decoder import decode_side
from slimkv.ops.gather.api import GatherRequest


def supports(request: GatherRequest) -> str | None:
    """Everything."""
    return None


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather.gather``."""
    check_slot_range("slots", request.slots, request.pages, request.layout)
    tokens, slots = request.layout.block_size, request.slots.long()
    absent = slots < 0
    blocks, inside = torch.unique(slots.clamp(min=0) // tokens, return_inverse=True)
    pages = request.pages.index_select(0, blocks)
    index = inside * tokens + slots.clamp(min=0) % tokens
    spec = request.layout.spec
    for transposed, fmt, rotation, out in (
        (False, spec.key, request.codec.key_rotation, request.key),
        (True, spec.value, request.codec.value_rotation, request.value),
    ):
        x = decode_side(pages, request.layout, request.codec, transposed).values()  # [num_kv_heads, tokens, dim]
        x = x.transpose(0, 1)[index]
        if fmt.rotated and not request.rotated:
            x = x @ rotation.T
        out.copy_(x.masked_fill_(absent[:, None, None], 0))
