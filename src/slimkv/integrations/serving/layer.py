"""``ServedLayer``: how the keys and values of one layer are stored and checked on this rank, in any serving engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.guard import MIN_TOKENS, Guard
from slimkv.calibration.learned_offset import LayerOffset, is_capturing
from slimkv.codec import Codec
from slimkv.ops import AttendOptions, PackedKV, Rounding
from slimkv.ops.warmup import LayerKind
from slimkv.spec import PageLayout


@dataclass(frozen=True)
class ServedLayer:
    """The codec of a layer, with its query-aware matrices and key offset."""

    codec: Codec
    matrices: Tensor | None = None  # for query-aware rounding: one per KV head, or one per head and position range
    offset: LayerOffset | None = None  # subtracted from keys; unknown until the first prompt unless calibrated
    backend: str | None = None  # name of the backend that stores

    def packed(self, pages: Tensor, layout: PageLayout) -> PackedKV:
        """The layer's pages uint8 [blocks, num_kv_heads, page_bytes]."""
        return PackedKV(pages, self.codec, layout, None if self.offset is None else self.offset.tensor)

    def rounding(self, index: Tensor | None) -> Rounding | None:
        """The rounding of new keys. ``index``: int32 [tokens], each key's position range, for matrices by range."""
        if self.matrices is None:
            return None
        return Rounding(self.matrices, index if self.matrices.ndim == 4 else None)

    def store(
        self, key: Tensor, value: Tensor, kv: PackedKV, slots: Tensor, index: Tensor | None, starts: Tensor | None
    ) -> None:
        """Encodes key and value [tokens, num_kv_heads, dim] into ``slots`` [tokens] of ``kv``.

        ``index``: see ``rounding``. ``starts``: int32 [requests + 1], the first token of each request; with it, the
        offset is learned from the first request alone.
        """
        if self.offset is not None and not self.offset.known:
            self.offset.learn(key, _real(slots, kv), kv.pages[1:], None if starts is None else starts[1])
        ops.store_kv(key, value, kv, slots, self.rounding(index), backend=self.backend)

    def check_scores(
        self, guard: Guard, name: str, query: Tensor, key: Tensor, kv: PackedKV, slots: Tensor, scale: float
    ) -> None:
        """Compares attention scores from stored keys with exact scores. Call it if the guard wants layer ``name``.

        query [tokens, num_heads, dim] and key [tokens, num_kv_heads, dim] belong to the tokens in ``slots`` [tokens].
        """
        if is_capturing(query.device):
            return
        rows = _real(slots, kv).nonzero().flatten()
        if len(rows) < MIN_TOKENS:  # warm-up steps store nothing, and ranks may share the tokens
            return

        def stored(chosen: Tensor) -> Tensor:
            return ops.gather_kv(kv, slots[rows[chosen]])[0]

        guard.compare(name, query[: len(slots)], key[rows], stored, scale)

    def kind(
        self, num_heads: int, num_kv_heads: int, dtype: torch.dtype, layout: PageLayout, options: AttendOptions
    ) -> LayerKind:
        """The properties that the layer's kernels are compiled for; ``dtype`` is that of queries."""
        return LayerKind(
            self.codec, layout, num_heads, num_kv_heads, dtype, options,
            None if self.offset is None else self.offset.tensor, self.matrices, self.backend,
        )  # fmt: skip


def warm_guard(kind: LayerKind) -> None:
    """Compiles the kernel that reads keys in ``check_scores``. Triton compiles two variants: row counts divisible by
    16, and all others."""
    device = kind.codec.device
    pages = torch.zeros(1, kind.num_kv_heads, kind.layout.page_bytes, dtype=torch.uint8, device=device)
    for rows in (MIN_TOKENS, MIN_TOKENS + 1):
        slots = torch.zeros(rows, dtype=torch.int64, device=device)
        ops.gather_kv(PackedKV(pages, kind.codec, kind.layout, kind.key_offset), slots)


def _real(slots: Tensor, kv: PackedKV) -> Tensor:
    """bool [tokens]: which slots belong to a request. Negative slots are padding. Warm-up steps, including a draft
    model's, write to page 0, which neither engine assigns to requests."""
    return slots >= kv.layout.block_size
