"""The same call step after step, as in decoding: what stays the same is checked and planned once.

The first call goes through ``store`` or ``attend``. A later one that differs only in where its vectors, slots and
lengths are is launched at once, where the implementation has an ``again``; any other difference leads back to the first
way.
Pages are remembered, not held: a cache that grows or moves its pages gets their memory back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.attend import REGISTRY as ATTEND
from slimkv.ops.attend import AttendOptions, AttendRequest, attend
from slimkv.ops.store import REGISTRY as STORE
from slimkv.ops.store import StoreRequest, store
from slimkv.spec import PageLayout


def _kind(x: Tensor) -> tuple[object, ...]:
    """All that a plan depends on but the address, of which kernels ask that vectors begin at multiples of 16 bytes."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


@dataclass(frozen=True)
class _Stored:
    pages: ref[Tensor]
    codec: Codec
    rounding: Tensor | None
    kinds: tuple[object, ...]
    run: Callable[[Tensor, Tensor, Tensor], None]


class _Repeated:
    """What both have: a layout and a last call, which copies do not share."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._last: Any = None

    def __getstate__(self) -> dict[str, object]:
        return {"_layout": self._layout, "_last": None}


class RepeatedStore(_Repeated):
    """``store`` into pages of one layout."""

    def __call__(
        self, key: Tensor, value: Tensor, pages: Tensor, slot_mapping: Tensor, *, codec: Codec,
        rounding: Tensor | None = None, impl: str | None = None,
    ) -> None:  # fmt: skip
        """See ``store``."""
        last: _Stored | None = self._last
        where = slot_mapping.shape, slot_mapping.dtype, slot_mapping.device, pages.data_ptr()
        kinds = _kind(key), _kind(value), where, impl
        if (
            last is not None and last.pages() is pages and last.codec is codec and last.rounding is rounding
            and last.kinds == kinds
        ):  # fmt: skip
            last.run(key, value, slot_mapping)
            return
        layout = self._layout
        store(key, value, pages, slot_mapping, codec=codec, layout=layout, rounding=rounding, impl=impl)
        request = StoreRequest(key, value, pages, slot_mapping, codec, layout, rounding)
        again = getattr(STORE.select(pages.device, request, impl).load(), "again", None)
        run = again(request) if again is not None else None
        self._last = None if run is None else _Stored(ref(pages), codec, rounding, kinds, run)


@dataclass(frozen=True)
class _Attended:
    pages: ref[Tensor]
    codec: Codec
    block_table: Tensor
    query_start: Tensor
    options: AttendOptions
    kinds: tuple[object, ...]
    run: Callable[[Tensor, Tensor, Tensor], None]


class RepeatedAttend(_Repeated):
    """``attend`` without fresh vectors on pages of one layout."""

    def __call__(
        self, query: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, query_start: Tensor, *,
        codec: Codec, max_query_len: int, max_seq_len: int, options: AttendOptions, impl: str | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``attend``. Lengths must stay within the blocks of the table, as ``max_seq_len`` would say."""
        where = seq_lens.shape, seq_lens.dtype, seq_lens.device, pages.data_ptr()
        last: _Attended | None = self._last
        kinds = _kind(query), where, max_query_len, impl
        if (
            last is not None and last.pages() is pages and last.block_table is block_table and last.codec is codec
            and last.query_start is query_start and last.options is options and last.kinds == kinds
        ):  # fmt: skip
            out = query.new_empty(*query.shape[:2], self._layout.spec.value_dim)
            last.run(query, out, seq_lens)
            return out
        layout = self._layout
        out = attend(
            query, pages, block_table, seq_lens, query_start, codec=codec, layout=layout, max_query_len=max_query_len,
            max_seq_len=max_seq_len, options=options, impl=impl,
        )  # type: ignore[assignment]  # fmt: skip
        assert isinstance(out, torch.Tensor)
        # The next steps are longer: as long as the table allows.
        request = AttendRequest(
            query, pages, block_table, seq_lens, query_start, max_query_len,
            block_table.shape[1] * layout.block_tokens, codec, layout, options, None, out, None, None, None,
        )  # fmt: skip
        again = getattr(ATTEND.select(pages.device, request, impl).load(), "again", None)
        run = again(request) if again is not None else None
        self._last = (
            None if run is None else _Attended(ref(pages), codec, block_table, query_start, options, kinds, run)
        )
        return out
