"""Arguments of kernels that read or write vectors of tokens: addresses, and strides in bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Vectors = tuple[torch.dtype, bool]  # the dtype, and whether every row starts at a multiple of 16 bytes


def vectors_of(x: Tensor) -> Vectors:
    """The dtype and alignment of x [tokens, heads, dim], for which a kernel is compiled."""
    size = x.element_size()
    return x.dtype, not (x.data_ptr() | x.stride(0) * size | x.stride(1) * size) & 15


def point_to_tokens(args: Any, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Fills in the arguments that change from call to call: K, V, pages and slots."""
    for side, x in ((args.key, key), (args.value, value)):
        size = x.element_size()
        side.x, side.stride, side.head_stride = x.data_ptr(), x.stride(0) * size, x.stride(1) * size
    args.pages, args.page_stride, args.page_head_stride = pages.data_ptr(), pages.stride(0), pages.stride(1)
    args.slots, args.tokens = slots.data_ptr(), slots.shape[0]
