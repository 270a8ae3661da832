"""The cells: shapes and formats that are timed, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from slimkv.errors import InputError
from slimkv.spec import CodecSpec, PageLayout


@dataclass(frozen=True)
class AttendCell:
    """``batch`` sequences of ``context`` tokens in pages, each with ``queries`` queries at its end."""

    name: str
    batch: int
    context: int
    queries: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    format: str = "k4v4"
    page: int = 64

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        return PageLayout(CodecSpec.parse(self.format, self.head_dim), self.page)

    @property
    def packed_bytes(self) -> int:
        """Bytes of pages that hold the sequences."""
        return self.layout.pool_bytes(self.batch * self.layout.blocks_for(self.context), self.num_kv_heads)

    def dense_bytes(self, element_bytes: int) -> int:
        """Bytes of the same K and V as plain tensors."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def flops(self) -> float:
        """Multiplications and additions of the two products under a causal mask."""
        visible = self.queries * (self.context - (self.queries - 1) / 2)
        return 4.0 * self.batch * self.num_heads * self.head_dim * visible

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic, not memory, is what limits it."""
        return self.queries >= 64


@dataclass(frozen=True)
class StoreCell:
    """``tokens`` new tokens: a prefill chunk in whole pages, or one token of each of many sequences (``scattered``).

    ``query_aware``: keys are rounded with a matrix per head. ``warm``: a chunk that has just been written, not one
    that is read from memory.
    """

    name: str
    tokens: int
    scattered: bool = False
    warm: bool = False
    num_kv_heads: int = 8
    head_dim: int = 128
    format: str = "k4v4"
    page: int = 64
    query_aware: bool = False

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        return PageLayout(CodecSpec.parse(self.format, self.head_dim), self.page)

    def moved_bytes(self, element_bytes: int) -> int:
        """K and V read, and their bytes in the pages written."""
        read = 2 * self.tokens * self.num_kv_heads * self.head_dim * element_bytes
        return read + int(self.tokens * self.num_kv_heads * self.layout.bytes_per_token)


_BIG = AttendCell("", batch=32, context=32768)
ATTEND_CELLS = (
    replace(_BIG, name="decode-32x32K"),
    replace(_BIG, name="decode-8x32K", batch=8),
    replace(_BIG, name="decode-1x128K", batch=1, context=131072),
    replace(_BIG, name="decode-128x4K", batch=128, context=4096),
    replace(_BIG, name="decode-32x32K-k2v2", format="k2v2"),
    replace(_BIG, name="decode-32x32K-k3v3", format="k3v3"),
    replace(_BIG, name="decode-32x32K-k8v4", format="turboquant_k8v4"),
    replace(_BIG, name="decode-32x32K-4bit_nc", format="turboquant_4bit_nc"),
    replace(_BIG, name="decode-32x8K-16q2kv", context=8192, num_heads=16, num_kv_heads=2),
    replace(_BIG, name="decode-32x8K-9q3kv-d64", context=8192, num_heads=9, num_kv_heads=3, head_dim=64),
    replace(_BIG, name="verify-4q-32x32K", queries=4),
    replace(_BIG, name="prefill-2048q-1x32K", batch=1, queries=2048),
    replace(_BIG, name="rotation-off-32x32K", format="ku4vu4"),
    replace(_BIG, name="rotation-on-32x32K", format="kur4vur4"),
)

_CHUNK = StoreCell("", tokens=8192)
STORE_CELLS = (
    replace(_CHUNK, name="chunk-8192"),
    replace(_CHUNK, name="chunk-8192-warm", warm=True),
    replace(_CHUNK, name="chunk-8192-k2v2", format="k2v2"),
    replace(_CHUNK, name="chunk-8192-k8v4", format="turboquant_k8v4"),
    replace(_CHUNK, name="chunk-8192-4bit_nc", format="turboquant_4bit_nc"),
    replace(_CHUNK, name="decode-128", tokens=128, scattered=True),
    replace(_CHUNK, name="chunk-8192-query-aware", query_aware=True),
    replace(_CHUNK, name="decode-128-query-aware", tokens=128, scattered=True, query_aware=True),
    replace(_CHUNK, name="decode-128-4bit_nc", tokens=128, scattered=True, format="turboquant_4bit_nc"),
    replace(_CHUNK, name="rotation-off-8192", format="ku4vu4"),
    replace(_CHUNK, name="rotation-on-8192", format="kur4vur4"),
)

_SMALL = AttendCell("", batch=2, context=512, num_heads=4, num_kv_heads=2, head_dim=64, page=16)
SMALL_ATTEND_CELLS = (
    replace(_SMALL, name="decode-2x512"),
    replace(_SMALL, name="decode-2x512-k2v2", format="k2v2"),
    replace(_SMALL, name="prefill-64q-1x512", batch=1, queries=64),
    replace(_SMALL, name="rotation-off-2x512", format="ku4vu4"),
    replace(_SMALL, name="rotation-on-2x512", format="kur4vur4"),
)
_SMALL_CHUNK = StoreCell("", tokens=512, num_kv_heads=2, head_dim=64, page=16)
SMALL_STORE_CELLS = (
    replace(_SMALL_CHUNK, name="chunk-512"),
    replace(_SMALL_CHUNK, name="chunk-512-warm", warm=True),
    replace(_SMALL_CHUNK, name="decode-16", tokens=16, scattered=True),
    replace(_SMALL_CHUNK, name="chunk-512-query-aware", query_aware=True),
    replace(_SMALL_CHUNK, name="rotation-off-512", format="ku4vu4"),
    replace(_SMALL_CHUNK, name="rotation-on-512", format="kur4vur4"),
)


Cell = TypeVar("Cell", AttendCell, StoreCell)


def choose(cells: tuple[Cell, ...], patterns: list[str], page: int | None) -> list[Cell]:
    """The cells whose name matches one of ``patterns`` (shell style; none: all), with pages of ``page`` tokens."""
    chosen = []
    for pattern in patterns or ["*"]:
        found = [cell for cell in cells if fnmatchcase(cell.name, pattern)]
        if not found:
            raise InputError(f"no cell is called {pattern!r}; known here are {', '.join(c.name for c in cells)}")
        chosen += [cell for cell in found if cell not in chosen]
    return chosen if page is None else [replace(cell, page=page) for cell in chosen]
