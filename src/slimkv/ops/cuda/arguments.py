"""Argument structures of CUDA kernels, read from their sources."""

from __future__ import annotations

from typing import Any

from slimkv.ops.structures import declared

PACKAGE = "slimkv.ops.cuda"
(Table,) = declared(PACKAGE, "common/codes.cuh", "Table")


def arguments(source: str, *names: str) -> list[Any]:
    """The ctypes structure of each ``struct name`` in ``source``. Fields may be arrays or ``Table``."""
    return declared(PACKAGE, source, *names, known=(Table,))
