"""copy in plain torch: one indexed read or write through the layout's byte offsets."""

from __future__ import annotations

from slimkv.codec.pack import token_bytes
from slimkv.ops.checks import check_slot_range
from slimkv.ops.copy.api import CopyRequest


def run(request: CopyRequest) -> None:
    """See ``slimkv.ops.copy.api``."""
    check_slot_range("slots", request.slots, request.pages, request.layout)
    kept = (request.slots >= 0).nonzero().flatten()
    where = token_bytes(request.layout, request.pages, request.slots[kept].long())
    if request.to_pages:
        request.pages[where] = request.rows[kept]
    else:
        request.rows[kept] = request.pages[where]
