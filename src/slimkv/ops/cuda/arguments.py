"""Arguments of CUDA kernels, as their sources declare them."""

from __future__ import annotations

from typing import Any

from slimkv.ops.structures import declared

PACKAGE = "slimkv.ops.cuda"
(Table,) = declared(PACKAGE, "common/codes.cuh", "Table")


def arguments(source: str, *names: str) -> list[Any]:
    """``struct name`` of ``source`` for each name; a tuple becomes a field that is a structure or an array."""
    return declared(PACKAGE, source, *names, known=(Table,))
