"""Copies K and V of many layers between caches and dense rows in one launch, as host time dominates small copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimkv.spec import TILE_TOKENS


@triton.jit
def _copy_side(heads_ptr, blocks_ptr, dense_ptr, block_stride, token_stride, dense_stride,
               TOKENS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
               READ: tl.constexpr):  # fmt: skip
    """Copies M tokens of one head; they are ``token_stride`` apart in a block and ``dense_stride`` apart as rows."""
    first, head = tl.program_id(0).to(tl.int64) * M, tl.program_id(1)
    row, dim = tl.arange(0, M)[:, None], tl.arange(0, DP)[None, :]
    inside = (row >= 0) & (dim < D)
    cache = tl.load(heads_ptr + head).to(tl.pointer_type(dense_ptr.dtype.element_ty))
    cache += tl.load(blocks_ptr + first // TOKENS) * block_stride + (first % TOKENS + row) * token_stride + dim
    dense = dense_ptr + (first + row) * dense_stride + head * D + dim
    if READ:
        tl.store(dense, tl.load(cache, mask=inside), mask=inside)
    else:
        tl.store(cache, tl.load(dense, mask=inside), mask=inside)


@triton.jit
def _copy_rows(key_heads, value_heads, blocks_ptr, key_ptr, value_ptr, key_block, value_block, key_token, value_token,
               key_row, value_row, TOKENS: tl.constexpr, M: tl.constexpr, KD: tl.constexpr, KP: tl.constexpr,
               VD: tl.constexpr, VP: tl.constexpr, READ: tl.constexpr):  # fmt: skip
    """Each program copies M tokens of one head: K if its index on axis 2 is 0, V if it is 1."""
    if tl.program_id(2) == 0:
        _copy_side(key_heads, blocks_ptr, key_ptr, key_block, key_token, key_row, TOKENS, M, KD, KP, READ)
    else:
        _copy_side(value_heads, blocks_ptr, value_ptr, value_block, value_token, value_row, TOKENS, M, VD, VP, READ)


class LayerRows:
    """The caches of several layers. ``layers``: K and V of each, as views [blocks, tokens, heads, dim] with one dtype,
    equal strides over blocks and tokens, and a contiguous last axis."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers  # keeps the memory alive that the pointers below address
        self._heads = [
            torch.tensor(
                [x.data_ptr() + h * x.stride(2) * x.itemsize for x in side for h in range(x.shape[2])],
                device=side[0].device,
            )
            for side in zip(*layers, strict=True)
        ]

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, Tensor] | None]) -> LayerRows | None:
        """The rows of ``layers``; None if a layer has no views, or if dtypes, shapes or strides differ."""
        known = [x for x in layers if x is not None]
        kinds = {tuple((x.stride(0), x.stride(1), x.shape[1], x.shape[3], x.dtype) for x in pair) for pair in known}
        return cls(known) if len(known) == len(layers) and len(kinds) == 1 else None

    def copy(self, blocks: Tensor, key: Tensor, value: Tensor, *, read: bool) -> None:
        """Copies ``blocks``, int64 [n], to key and value [n * tokens, all heads, dim] (``read``), or from them."""
        k, v = self._layers[0]
        _copy_rows[(len(key) // TILE_TOKENS, key.shape[1], 2)](
            *self._heads, blocks, key, value, k.stride(0), v.stride(0), k.stride(1), v.stride(1), key.stride(0),
            value.stride(0), TOKENS=k.shape[1], M=TILE_TOKENS, KD=k.shape[3],
            KP=triton.next_power_of_2(k.shape[3]), VD=v.shape[3], VP=triton.next_power_of_2(v.shape[3]), READ=read,
        )  # fmt: skip
