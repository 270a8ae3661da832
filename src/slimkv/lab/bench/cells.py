"""The cells: shapes and formats that are timed, by name; ``cells.json`` lists them in groups."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, TypeVar

import torch

from slimkv.errors import InputError
from slimkv.spec import CodecSpec, LatentSpec, PageLayout


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype of K, V and queries: bfloat16 on a GPU, float32 on a CPU, where it is faster."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Cell:
    """The shape of packed tokens. With ``rope_dim``, they are MLA latents of ``head_dim`` values and a rope part."""

    name: str
    num_kv_heads: int = 8
    head_dim: int = 128
    rope_dim: int = 0
    format: str = "k4v4"
    page: int = 64

    @property
    def sizes(self) -> dict[str, int]:
        """The shape as reports name it."""
        names = ("batch", "context", "queries", "tokens", "num_heads", "num_kv_heads", "head_dim", "page")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    @property
    def layout(self) -> PageLayout:
        """The pages of this cell."""
        if self.rope_dim:
            return PageLayout(LatentSpec.parse(self.format, self.head_dim, self.rope_dim), self.page)
        return PageLayout(CodecSpec.parse(self.format, self.head_dim), self.page)

    def layout_on(self, device: torch.device) -> PageLayout:
        """The same pages with raw values in the dtype that ``device`` computes in."""
        dtype = str(compute_dtype(device)).removeprefix("torch.")
        return PageLayout(self.layout.spec.with_raw_dtype(dtype), self.page)

    def dense_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of one token's K and V as plain tensors."""
        return self.num_kv_heads * (self.layout.spec.key_dim + self.layout.spec.value_dim) * element_bytes


@dataclass(frozen=True)
class AttendCell(Cell):
    """``batch`` sequences of ``context`` tokens in pages, each with ``queries`` queries at its end.

    ``shortest``: the lengths are a geometric series from this to ``context``, in random order. The rest are options
    of ``attend``; ``sinks`` gives every query head a sink. With ``deterministic``, baselines do not split sequences.
    """

    batch: int = 32
    context: int = 32768
    queries: int = 1
    num_heads: int = 32
    shortest: int | None = None
    sliding_window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    prefill: str = "16bit"
    deterministic: bool = False

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head size); for latents, the size of heads before absorption: 128 plus the rope part."""
        return 1 / math.sqrt(128 + self.rope_dim if self.rope_dim else self.head_dim)

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
        return self.read_tokens * self.dense_bytes_per_token(element_bytes)

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products under a causal mask and the sliding window."""
        most = self.sliding_window or self.context
        visible = sum(min(most, length - i) for length in self.lengths for i in range(self.queries))
        return 2.0 * self.num_heads * (2 * self.head_dim + self.rope_dim) * visible

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic, not memory, limits the speed."""
        return self.queries * (self.num_heads if self.rope_dim else 1) >= 64


@dataclass(frozen=True)
class StoreCell(Cell):
    """``tokens`` new tokens: a prefill chunk in whole pages, or one token of each of many sequences (``scattered``).

    ``query_aware``: keys are rounded with a matrix per head. ``warm``: the chunk has just been written and is in the L2
    cache. ``centred``: an offset is subtracted from keys.
    """

    tokens: int = 8192
    scattered: bool = False
    warm: bool = False
    query_aware: bool = False
    max_positions: int = 0  # positions that the matrices cover (0: one matrix); in a decode step they are random
    centred: bool = False

    def moved_bytes(self, element_bytes: int) -> int:
        """Bytes of K and V that are read, and of their codes that are written."""
        read = self.tokens * self.dense_bytes_per_token(element_bytes)
        return read + int(self.tokens * self.num_kv_heads * self.layout.bytes_per_token)


def _read_cells() -> dict[str, tuple[Any, ...]]:
    """The groups of ``cells.json``. A row has the fields that differ from ``defaults``, or from cell ``like``."""
    table = json.loads(resources.files("slimkv.lab.bench").joinpath("cells.json").read_text(encoding="utf-8"))
    known: dict[str, AttendCell | StoreCell] = {}
    for group, rows in table.items():
        kind = StoreCell if group.startswith("store") else AttendCell
        default = kind("", **rows.pop("defaults"))
        for name, row in rows.items():
            known[name] = replace(known[row.pop("like")] if "like" in row else default, name=name, **row)
    return {group: tuple(known[name] for name in rows) for group, rows in table.items()}


CELLS = _read_cells()
T = TypeVar("T", AttendCell, StoreCell)


def choose(cells: tuple[T, ...], patterns: Sequence[str], page: int | None) -> list[T]:
    """The cells whose name matches one of ``patterns`` (shell style), with pages of ``page`` tokens.

    Without a pattern, and with the pattern ``all``, these are all of ``cells``.
    """
    chosen: list[T] = []
    for pattern in patterns or ["*"]:
        pattern = "*" if pattern == "all" else pattern
        found = [cell for cell in cells if fnmatchcase(cell.name, pattern)]
        if not found:
            raise InputError(f"no cell is called {pattern!r}; known here are {', '.join(c.name for c in cells)}")
        chosen += [cell for cell in found if cell not in chosen]
    return chosen if page is None else [replace(cell, page=page) for cell in chosen]
