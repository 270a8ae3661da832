"""The same call step after step, as in decoding: what stays the same is checked and planned once.

The first call goes through ``store`` or ``attend``. When the next one differs only in where its vectors, slots and
lengths are, it is planned by the implementation's ``again``, and from then on launched at once; any other difference
leads back to the first way, and so does an implementation without ``again``.
Pages are remembered, not held: a cache that grows or moves its pages gets their memory back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from weakref import ref

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.attention.api import REGISTRY as ATTEND
from slimkv.ops.attention.api import AttendOptions, AttendRequest, attend
from slimkv.ops.registry import Registry
from slimkv.ops.store.api import REGISTRY as STORE
from slimkv.ops.store.api import StoreRequest, store_kv
from slimkv.spec import PageLayout

Run = Callable[[Tensor, Tensor, Tensor], None]


def _kind(x: Tensor) -> tuple[object, ...]:
    """All that a plan depends on but the address, of which kernels ask that vectors begin at multiples of 16 bytes."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


@dataclass
class _Last:
    """A call, and how it is run again once it has been planned; None where it cannot be."""

    pages: ref[Tensor]
    same: tuple[object, ...]  # objects that must be the very same
    kinds: tuple[object, ...]
    planned: bool = False
    run: Run | None = None


class _Repeated:
    """A layout and the last call on it, which copies do not share."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._last: _Last | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_layout": self._layout, "_last": None}

    def _repeats(self, pages: Tensor, same: tuple[object, ...], kinds: tuple[object, ...]) -> _Last | None:
        """The last call if this one differs from it in addresses alone; otherwise this one is the last from now on."""
        last = self._last
        if last is not None and last.kinds == kinds and last.pages() is pages and all(map(is_, last.same, same)):
            return last
        self._last = _Last(ref(pages), same, kinds)
        return None


def _plan(last: _Last, registry: Registry, request: StoreRequest | AttendRequest, backend: str | None) -> None:
    again = getattr(registry.select(request.pages.device, request, backend).load(), "again", None)
    last.planned, last.run = True, again(request) if again is not None else None


class RepeatedStore(_Repeated):
    """``store`` into pages of one layout."""

    def __call__(
        self, key: Tensor, value: Tensor, pages: Tensor, slot_mapping: Tensor, *, codec: Codec,
        query_aware: Tensor | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        """See ``store``."""
        where = slot_mapping.shape, slot_mapping.dtype, slot_mapping.device, pages.data_ptr()
        last = self._repeats(pages, (codec, query_aware), (_kind(key), _kind(value), where, backend))
        if last is not None and not last.planned:
            _plan(last, STORE, StoreRequest(key, value, pages, slot_mapping, codec, self._layout, query_aware), backend)
        if last is not None and last.run is not None:
            last.run(key, value, slot_mapping)
            return
        store_kv(
            key, value, pages, slot_mapping, codec=codec, layout=self._layout, query_aware=query_aware, backend=backend
        )


class RepeatedAttend(_Repeated):
    """``attend`` without fresh vectors on pages of one layout."""

    def __call__(
        self, query: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *,
        codec: Codec, max_query_len: int, max_seq_len: int, options: AttendOptions, backend: str | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``attend``. Lengths must stay within the blocks of the table, as ``max_seq_len`` would say."""
        where = seq_lens.shape, seq_lens.dtype, seq_lens.device, pages.data_ptr()
        same = codec, block_table, cu_seqlens_q, options
        last = self._repeats(pages, same, (_kind(query), where, max_query_len, backend))
        layout, shape = self._layout, (*query.shape[:2], self._layout.spec.value_dim)
        if last is not None and not last.planned:
            # The next steps are longer: as long as the table allows.
            longest = block_table.shape[1] * layout.block_size
            request = AttendRequest(
                query, pages, block_table, seq_lens, cu_seqlens_q, max_query_len, longest, codec, layout, options,
                None, query.new_empty(shape), None, None, None,
            )  # fmt: skip
            _plan(last, ATTEND, request, backend)
        if last is not None and last.run is not None:
            out = query.new_empty(shape)
            last.run(query, out, seq_lens)
            return out
        found = attend(
            query, pages, block_table, seq_lens, cu_seqlens_q, codec=codec, layout=layout, max_query_len=max_query_len,
            max_seq_len=max_seq_len, options=options, backend=backend,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor)
        return found
