"""The cells: shapes and formats that are timed, by name."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from slimkv.errors import InputError
from slimkv.spec import CodecSpec, LatentSpec, PageLayout


@dataclass(frozen=True)
class AttendCell:
    """``batch`` sequences of ``context`` tokens in pages, each with ``queries`` queries at its end.

    ``shortest``: the lengths are a geometric series from this to ``context``, in random order. The rest are options
    of ``attend``; ``sinks`` gives every query head one. The baselines of ``deterministic`` do not split sequences.
    """

    name: str
    batch: int
    context: int
    queries: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    format: str = "k4v4"
    page: int = 64
    shortest: int | None = None
    sliding_window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    prefill: str = "16bit"
    deterministic: bool = False

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        return PageLayout(CodecSpec.parse(self.format, self.head_dim), self.page)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; the first is the longest."""
        if self.shortest is None:
            return (self.context,) * self.batch
        ratio = (self.shortest / self.context) ** (1 / max(1, self.batch - 1))
        lengths = [round(self.context * ratio**i) for i in range(self.batch)]
        return (lengths[0], *random.Random(0).sample(lengths[1:], self.batch - 1))

    @property
    def read_tokens(self) -> int:
        """Tokens that at least one query sees, in all sequences."""
        seen = (self.sliding_window or self.context) + self.queries - 1
        return sum(min(length, seen) for length in self.lengths)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the pages that are read."""
        return int(self.read_tokens * self.num_kv_heads * self.layout.bytes_per_token)

    def dense_bytes(self, element_bytes: int) -> int:
        """Bytes of the same K and V as plain tensors."""
        return 2 * self.read_tokens * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def flops(self) -> float:
        """Multiplications and additions of the two products under a causal mask."""
        visible = sum(self.queries * (length - (self.queries - 1) / 2) for length in self.lengths)
        return 4.0 * self.num_heads * self.head_dim * visible

    @property
    def compute_bound(self) -> bool:
        """Whether the cell is compute-bound."""
        return self.queries >= 64


@dataclass(frozen=True)
class StoreCell:
    """``tokens`` new tokens: a prefill chunk in whole pages, or one token of each of many sequences (``scattered``).

    ``query_aware``: keys are rounded with a matrix per head. ``warm``: the chunk has just been written and is in the L2
    cache. ``rope_dim``: latents of ``head_dim`` with rope parts of that. ``centred``: an offset is subtracted from
    keys.
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
    max_positions: int = 0  # positions per matrix; the tokens of a decode step are scattered over several ranges
    rope_dim: int = 0
    centred: bool = False

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        if self.rope_dim:
            return PageLayout(LatentSpec.parse(self.format, self.head_dim, self.rope_dim), self.page)
        return PageLayout(CodecSpec.parse(self.format, self.head_dim), self.page)

    def moved_bytes(self, element_bytes: int) -> int:
        """K and V read, and their bytes in the pages written."""
        spec = self.layout.spec
        read = self.tokens * self.num_kv_heads * (spec.key_dim + spec.value_dim) * element_bytes
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
# Further cells: other widths, head sizes, groups, drafts, ragged and small batches, short chunks.
MORE_ATTEND_CELLS = (
    *(replace(_BIG, name=f"decode-32x32K-{f}", format=f) for f in ("k5v5", "k6v4", "k6v6", "k7v7", "k8v8")),
    replace(_BIG, name="decode-16x32K-64q8kv", batch=16, num_heads=64),
    replace(_BIG, name="decode-8x32K-24q4kv-d256", batch=8, num_heads=24, num_kv_heads=4, head_dim=256),
    replace(_BIG, name="decode-32x16K-28q4kv", context=16384, num_heads=28, num_kv_heads=4),
    replace(_BIG, name="decode-32x16K-28q4kv-k5v5", context=16384, num_heads=28, num_kv_heads=4, format="k5v5"),
    replace(_BIG, name="decode-8x8K-32q32kv", batch=8, context=8192, num_kv_heads=32),
    replace(_BIG, name="decode-ragged-64x256-64K", batch=64, context=65536, shortest=256, num_heads=24),
    replace(_BIG, name="decode-256x1K", batch=256, context=1024),
    replace(_BIG, name="decode-1x2K", batch=1, context=2048),
    replace(_BIG, name="decode-32x16K-64q8kv-d64-sinks", context=16384, num_heads=64, head_dim=64, sinks=True),
    replace(
        _BIG, name="decode-32x16K-64q8kv-d64-window128", context=16384, num_heads=64, head_dim=64, sinks=True,
        sliding_window=128,
    ),
    replace(_BIG, name="decode-16x4K-32q32kv-d96", batch=16, context=4096, num_kv_heads=32, head_dim=96),
    replace(
        _BIG, name="decode-8x8K-16q8kv-d256-softcap", batch=8, context=8192, num_heads=16, head_dim=256, softcap=50
    ),
    replace(
        _BIG, name="decode-8x32K-16q8kv-d256-window4K", batch=8, num_heads=16, head_dim=256, sliding_window=4096
    ),
    replace(_BIG, name="decode-32x8K-8q1kv-d256", context=8192, num_heads=8, num_kv_heads=1, head_dim=256),
    replace(_BIG, name="verify-4q-16x16K", batch=16, context=16384, queries=4),
    *(
        replace(_BIG, name=f"verify-{queries}q-16x16K", batch=16, context=16384, queries=queries)
        for queries in (8, 12, 16)
    ),
    replace(_BIG, name="chunk-64q-32x8K", context=8192, queries=64),
    replace(_BIG, name="chunk-512q-16x8K", batch=16, context=8704, queries=512),
    replace(_BIG, name="prefill-2048q-1x16K-d64", batch=1, context=16384, queries=2048, head_dim=64),
    replace(
        _BIG, name="prefill-2048q-1x16K-d256", batch=1, context=16384, queries=2048, num_heads=16, head_dim=256
    ),
    replace(_BIG, name="prefill-2048q-1x128K", batch=1, context=131072, queries=2048),
    replace(_BIG, name="prefill-8192q-1x8K", batch=1, context=8192, queries=8192),
)  # fmt: skip
_PREFILLED = (
    "prefill-2048q-1x32K",
    "prefill-2048q-1x128K",
    "prefill-8192q-1x8K",
    "chunk-512q-16x8K",
    "prefill-2048q-1x16K-d64",
)
_DETERMINISTIC = (
    *("decode-32x32K", "decode-8x32K", "decode-1x128K", "decode-8x32K-24q4kv-d256", "decode-256x1K"),
    *("decode-ragged-64x256-64K", "decode-32x16K-64q8kv-d64-window128", "verify-4q-32x32K", "verify-8q-16x16K"),
    *("chunk-64q-32x8K", "prefill-2048q-1x32K"),
)
MORE_ATTEND_CELLS += tuple(
    replace(cell, name=f"{cell.name}-{how}", **options)
    for how, names, options in (
        ("8bit", _PREFILLED, {"prefill": "8bit"}),
        ("deterministic", _DETERMINISTIC, {"deterministic": True}),
    )
    for cell in ATTEND_CELLS + MORE_ATTEND_CELLS
    if cell.name in names
)

_CHUNK = StoreCell("", tokens=8192)
_LATENTS = StoreCell("", tokens=8192, num_kv_heads=1, head_dim=512, rope_dim=64, format="c4")
STORE_CELLS = (
    replace(_CHUNK, name="chunk-8192"),
    replace(_CHUNK, name="chunk-8192-warm", warm=True),
    replace(_CHUNK, name="chunk-8192-centred", centred=True),
    replace(_CHUNK, name="chunk-8192-warm-centred", warm=True, centred=True),
    replace(_CHUNK, name="decode-32", tokens=32, scattered=True),
    replace(_CHUNK, name="decode-32-centred", tokens=32, scattered=True, centred=True),
    replace(_CHUNK, name="chunk-8192-k2v2", format="k2v2"),
    replace(_CHUNK, name="chunk-8192-k8v4", format="turboquant_k8v4"),
    replace(_CHUNK, name="chunk-8192-4bit_nc", format="turboquant_4bit_nc"),
    replace(_CHUNK, name="decode-128", tokens=128, scattered=True),
    replace(_CHUNK, name="decode-128-k5v5", tokens=128, scattered=True, format="k5v5"),
    *(
        replace(_CHUNK, name=f"decode-16-{format}", tokens=16, num_kv_heads=4, scattered=True, format=format)
        for format in ("k4v4", "k5v5", "k6v6", "k8v8")
    ),
    replace(_CHUNK, name="chunk-8192-query-aware", query_aware=True),
    replace(_CHUNK, name="decode-128-query-aware", tokens=128, scattered=True, query_aware=True),
    replace(_CHUNK, name="chunk-8192-query-aware-positions", query_aware=True, max_positions=8192),
    replace(
        _CHUNK,
        name="decode-128-query-aware-positions",
        tokens=128,
        scattered=True,
        query_aware=True,
        max_positions=8192,
    ),
    replace(_CHUNK, name="decode-128-4bit_nc", tokens=128, scattered=True, format="turboquant_4bit_nc"),
    replace(_CHUNK, name="rotation-off-8192", format="ku4vu4"),
    replace(_CHUNK, name="rotation-on-8192", format="kur4vur4"),
    replace(_LATENTS, name="mla-decode-32", tokens=32, scattered=True),
    replace(_LATENTS, name="mla-decode-128", tokens=128, scattered=True),
    replace(_LATENTS, name="mla-chunk-8192"),
    replace(_LATENTS, name="mla-decode-32-c4r8", tokens=32, scattered=True, format="c4r8"),
    replace(_LATENTS, name="mla-chunk-8192-c4r8", format="c4r8"),
)

_SMALL = AttendCell("", batch=2, context=512, num_heads=4, num_kv_heads=2, head_dim=64, page=16)
SMALL_ATTEND_CELLS = (
    replace(_SMALL, name="decode-2x512"),
    replace(_SMALL, name="decode-2x512-k2v2", format="k2v2"),
    replace(_SMALL, name="prefill-64q-1x512", batch=1, queries=64),
    replace(_SMALL, name="rotation-off-2x512", format="ku4vu4"),
    replace(_SMALL, name="rotation-on-2x512", format="kur4vur4"),
)
# Only run if named with --cells: too long for the default on a CPU.
_CPU = AttendCell("", batch=1, context=16384, num_heads=8, num_kv_heads=2, head_dim=128, page=64)
CPU_ATTEND_CELLS = (
    replace(_CPU, name="decode-1x16K-8q2kv"),
    replace(_CPU, name="decode-1x16K-8q2kv-k3v3", format="k3v3"),
    replace(_CPU, name="decode-1x16K-8q2kv-k5v5", format="k5v5"),
    replace(_CPU, name="decode-1x16K-8q2kv-fp8", format="fp8"),
    replace(_CPU, name="decode-1x2K-9q3kv-d64", context=2048, num_heads=9, num_kv_heads=3, head_dim=64),
    replace(_CPU, name="decode-8x1K-9q3kv-d64", batch=8, context=1024, num_heads=9, num_kv_heads=3, head_dim=64),
    replace(_CPU, name="prefill-256q-1x2K", context=2048, queries=256),
)
_SMALL_CHUNK = StoreCell("", tokens=512, num_kv_heads=2, head_dim=64, page=16)
SMALL_STORE_CELLS = (
    replace(_SMALL_CHUNK, name="chunk-512"),
    replace(_SMALL_CHUNK, name="chunk-512-warm", warm=True),
    replace(_SMALL_CHUNK, name="chunk-512-centred", centred=True),
    replace(_SMALL_CHUNK, name="decode-16", tokens=16, scattered=True),
    replace(_SMALL_CHUNK, name="chunk-512-query-aware", query_aware=True),
    replace(_SMALL_CHUNK, name="chunk-512-query-aware-positions", query_aware=True, max_positions=512),
    replace(_SMALL_CHUNK, name="rotation-off-512", format="ku4vu4"),
    replace(_SMALL_CHUNK, name="rotation-on-512", format="kur4vur4"),
    StoreCell("mla-decode-16", tokens=16, scattered=True, num_kv_heads=1, head_dim=128, rope_dim=32, format="c4"),
)
CPU_STORE_CELLS = (
    StoreCell("decode-1-3kv-d64", tokens=1, num_kv_heads=3, head_dim=64, page=64, scattered=True),
    StoreCell("chunk-2048-3kv-d64", tokens=2048, num_kv_heads=3, head_dim=64, page=64),
)


Cell = TypeVar("Cell", AttendCell, StoreCell)


def choose(cells: tuple[Cell, ...], patterns: list[str], page: int | None) -> list[Cell]:
    """The cells whose name matches one of ``patterns`` (shell style), with pages of ``page`` tokens.

    Without a pattern, the default cells; ``all`` selects every cell.
    """
    chosen: list[Cell] = []
    for pattern in patterns or ["*"]:
        pattern = "*" if pattern == "all" else pattern
        found = [cell for cell in cells if fnmatchcase(cell.name, pattern)]
        if not found:
            raise InputError(f"no cell is called {pattern!r}; known here are {', '.join(c.name for c in cells)}")
        chosen += [cell for cell in found if cell not in chosen]
    return chosen if page is None else [replace(cell, page=page) for cell in chosen]
