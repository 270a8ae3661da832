"""Where kernels find the vectors of tokens: addresses, and distances in bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Place = tuple[int, int, int]  # address, and bytes from a token to the next and from a head to the next


def place(x: Tensor) -> Place:
    """x: [tokens, heads, dim]."""
    size = x.element_size()
    return x.data_ptr(), x.stride(0) * size, x.stride(1) * size


def in_vectors(where: Place) -> bool:
    """Every row starts at a multiple of 16 bytes."""
    start, stride, head_stride = where
    return not (start | stride | head_stride) & 15


def point_to_tokens(args: Any, key: Place, value: Place, pages: Tensor, slots: Tensor) -> None:
    """Fills in what differs from call to call of a structure that has K, V, pages and slots."""
    for side, where in ((args.key, key), (args.value, value)):
        side.x, side.stride, side.head_stride = where
    args.pages, args.page_stride, args.page_head_stride = pages.data_ptr(), pages.stride(0), pages.stride(1)
    args.slots, args.tokens = slots.data_ptr(), slots.shape[0]
