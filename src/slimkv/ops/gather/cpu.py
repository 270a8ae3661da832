"""gather on a CPU in one call of the compiled library."""

from __future__ import annotations

from slimkv.ops.cpu.module import Call, layout_tables, library
from slimkv.ops.cpu.structures import tokens_call
from slimkv.ops.gather.api import GatherRequest


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather.api.gather_kv``."""
    tables, slots = layout_tables(request.layout), request.slots.contiguous()
    Call(library().gather, tokens_call(tables, request, slots, keep_rotated=request.rotated), tables, slots)()
