"""``PagedPool``: the pages of one layer and the codec that reads and writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.arguments import describe, typed
from slimkv.cache.allocator import BlockAllocator
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.batch import AttentionBatch, PackedKV, Rounding
from slimkv.ops.checks import INTEGERS, check_slot_range
from slimkv.ops.plan import StorePlan, plan_store
from slimkv.spec import CodecSpec, page_layout, parse_spec


class PagedPool:
    """uint8 pages [blocks, num_kv_heads, page_bytes], their allocator, and the three operations on them.

    ``spec`` may be a format's name, such as ``"k4v4"``, with ``head_dim``.

    ``key_offset``: bfloat16 [num_kv_heads, key_dim] or None: subtracted from keys before they are encoded and added
    back by ``gather``; it must not change while tokens are stored.

    ``query_aware``: rounding matrices of keys, int8 [num_kv_heads, key_dim, key_dim], or one set of them per range of
    positions, or None; see ``slimkv.ops.store_kv``.
    """

    @typed
    def __init__(
        self, spec: CodecSpec | str, blocks: int, num_kv_heads: int, block_size: int = 64,
        device: torch.device | str = "cpu", backend: str | None = None, key_offset: Tensor | None = None,
        query_aware: Tensor | None = None, *, head_dim: int | None = None,
    ) -> None:  # fmt: skip
        spec = _spec(spec, head_dim)
        if num_kv_heads < 1:
            raise InputError(f"num_kv_heads must be at least 1, not {num_kv_heads}")
        self.layout = page_layout(spec, block_size)
        self.codec = Codec(spec, device)
        self.num_kv_heads = num_kv_heads
        self.backend = backend
        self.key_offset = key_offset
        self.query_aware = query_aware
        self._plan: StorePlan | None = None
        self.allocator = BlockAllocator(blocks)
        self.pages = torch.zeros(blocks, num_kv_heads, self.layout.page_bytes, dtype=torch.uint8, device=device)

    def __repr__(self) -> str:
        blocks = f"{self.allocator.count} blocks of {self.layout.block_size} tokens"
        return f"PagedPool({self.layout.spec.format}, {blocks}, {self.num_kv_heads} KV heads, {self.nbytes:,} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}  # a plan refers to pages, which a copied pool does not share

    @property
    def kv(self) -> PackedKV:
        """The pages as an argument of operations."""
        return PackedKV(self.pages, self.codec, self.layout, self.key_offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages; equals ``layout.pool_bytes(blocks, num_kv_heads)``."""
        return self.pages.untyped_storage().nbytes()

    @typed
    def grow(self, blocks: int) -> None:
        """Enlarges the pool to ``blocks`` blocks and keeps the stored tokens."""
        extra = blocks - self.allocator.count
        self.allocator.grow(blocks)
        if extra:
            fresh = self.pages.new_zeros(extra, self.num_kv_heads, self.layout.page_bytes)
            self._replace(torch.cat([self.pages, fresh]))

    def rearrange(self, source: Tensor, target: Tensor, blocks: int) -> None:
        """Allocates new pages of ``blocks`` blocks and copies block ``source[i]`` to ``target[i]``."""
        fresh = self.pages.new_zeros(blocks, *self.pages.shape[1:])
        fresh[target.to(fresh.device)] = self.pages[source.to(fresh.device)]
        self.allocator = BlockAllocator(blocks)
        self._replace(fresh)

    @typed
    def move_tokens(self, source: Tensor, target: Tensor) -> None:
        """Copies the token in slot ``source[i]`` to slot ``target[i]``; all are read before any is written."""
        pages = self.pages
        for name, slots in (("source", source), ("target", target)):
            if slots.dtype not in INTEGERS or slots.ndim != 1 or slots.shape != source.shape:
                raise InputError(f"{name} must be int32 or int64 {list(source.shape[:1])} slots, not {describe(slots)}")
            check_slot_range(name, slots, pages, self.layout, least=0)
        ops.copy_tokens(pages, source.to(pages.device), target.to(pages.device), layout=self.layout)

    def to(self, device: torch.device | str) -> None:
        """Moves the pages, as offloading does; the codec stays where it is."""
        if self.pages.device != torch.device(device):
            self._replace(self.pages.to(device, non_blocking=True))

    def _replace(self, pages: Tensor) -> None:
        self.pages, self._plan = pages, None

    @typed
    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copies whole blocks."""
        if len(source) != len(target):
            raise InputError(f"source has {len(source)} blocks, target {len(target)}; their lengths must be equal")
        for name, blocks in (("source", source), ("target", target)):
            for block in blocks:
                if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < self.pages.shape[0]:
                    raise InputError(f"{name} has block {block!r}; the pool has blocks 0 to {self.pages.shape[0] - 1}")
        if source:
            index = torch.tensor([source, target], device=self.pages.device)
            self.pages[index[1]] = self.pages[index[0]]

    def make_writable(self, blocks: list[int], first_position: int) -> None:
        """Copy-on-write from ``first_position`` on: replaces shared blocks in ``blocks`` by copies."""
        start = first_position // self.layout.block_size
        source, target = [], []
        for i in range(start, len(blocks)):
            block, copy = self.allocator.writable(blocks[i])
            if copy:
                source.append(blocks[i])
                target.append(block)
                blocks[i] = block
        self.copy_blocks(source, target)

    def store(self, key: Tensor, value: Tensor, slot_mapping: Tensor, query_aware_index: Tensor | None = None) -> None:
        """Stores K [tokens, num_kv_heads, key_dim] and V [tokens, num_kv_heads, value_dim] in their slots.

        See ``slimkv.ops.store_kv``.
        """
        kv = self.kv
        rounding = None if self.query_aware is None else Rounding(self.query_aware, query_aware_index)
        if self._plan is None or not self._plan.fits(key, value, kv, slot_mapping, rounding):
            self._plan = plan_store(key, value, kv, slot_mapping, rounding, backend=self.backend)
        self._plan.run(key, value, slot_mapping, None if rounding is None else rounding.index)

    @typed
    def attend(
        self, query: Tensor, batch: AttentionBatch, options: ops.AttendOptions | None = None, **kwargs: Any
    ) -> Tensor:
        """query [queries, num_heads, key_dim] -> [queries, num_heads, value_dim]; see ``slimkv.ops.attend``."""
        return ops.attend(query, self.kv, batch, options, backend=self.backend, **kwargs)

    @typed
    def gather(self, slots: Tensor, dtype: torch.dtype = torch.float32, rotated: bool = False) -> tuple[Tensor, Tensor]:
        """slots [tokens] -> dense K and V; see ``slimkv.ops.gather_kv``."""
        return ops.gather_kv(self.kv, slots, dtype=dtype, rotated=rotated)


def _spec(spec: CodecSpec | str, head_dim: int | None) -> CodecSpec:
    if isinstance(spec, str):
        if head_dim is None:
            raise InputError(f"format name {spec!r} needs a head size: pass head_dim, for example head_dim=128")
        return parse_spec(spec, head_dim)
    if head_dim not in (None, spec.key_dim):
        raise InputError(f"head_dim={head_dim} contradicts the spec, which has key_dim={spec.key_dim}")
    return spec
