"""gather on a CPU in one call of the compiled library."""

from __future__ import annotations

import torch

from slimkv.ops.cpu.module import Call, layout_tables, library
from slimkv.ops.cpu.structures import CGatherCall, pages_of, vectors_of
from slimkv.ops.gather.api import GatherRequest


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather.api.gather_kv``."""
    tables, slots = layout_tables(request.layout), request.slots.contiguous()
    args = CGatherCall(
        layout=tables.address, pages=pages_of(request.pages), key=vectors_of(request.key),
        value=vectors_of(request.value), slots=slots.data_ptr(), tokens=slots.shape[0],
        wide_slots=slots.dtype == torch.int64, keep_rotated=request.rotated,
    )  # fmt: skip
    Call(library().gather, args, tables, slots)()
