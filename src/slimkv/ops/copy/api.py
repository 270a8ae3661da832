"""copy: single tokens between slots, and between slots and rows outside the pages. Bytes are copied without decoding.

A token owns whole bytes of its block's pages, given by the layout. Its *row* is those bytes in the order of
``slimkv.codec.pack``: uint8 [num_kv_heads, row_bytes]. Rows of one layout are valid in every block and position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.errors import InputError
from slimkv.ops.checks import check_pages, check_slots
from slimkv.ops.registry import Registry
from slimkv.spec import PageLayout


@dataclass(frozen=True)
class CopyRequest:
    """The checked arguments of one copy between slots and rows."""

    pages: Tensor
    slots: Tensor
    rows: Tensor
    layout: PageLayout
    to_pages: bool


REGISTRY = Registry.of_kernels("copy", "copy", cpu="reference", triton="triton", reference="reference")


@typed
def read_tokens(pages: Tensor, slots: Tensor, *, layout: PageLayout, backend: str | None = None) -> Tensor:
    """The rows of the tokens in ``slots``.

    Args:
        pages: uint8 [blocks, num_kv_heads, page_bytes].
        slots: int32 or int64 [tokens]: block * block_size + position; a negative slot gives zeros.

    Returns uint8 [tokens, num_kv_heads, row_bytes].
    """
    check_pages(pages, layout)
    check_slots("slots", slots, pages.device)
    rows = torch.zeros(slots.shape[0], pages.shape[1], layout.row_bytes, dtype=torch.uint8, device=pages.device)
    _run(CopyRequest(pages, slots, rows, layout, to_pages=False), backend)
    return rows


@typed
def write_tokens(rows: Tensor, pages: Tensor, slots: Tensor, *, layout: PageLayout, backend: str | None = None) -> None:
    """Writes rows that ``read_tokens`` returned to ``slots``, which must be distinct; negative slots are skipped.

    rows: uint8 [tokens, num_kv_heads, row_bytes], contiguous, on the pages' device.
    """
    check_pages(pages, layout)
    check_slots("slots", slots, pages.device)
    shape = (slots.shape[0], pages.shape[1], layout.row_bytes)
    if rows.dtype != torch.uint8 or tuple(rows.shape) != shape or rows.device != pages.device:
        raise InputError(
            f"rows must be uint8 {list(shape)} on {pages.device}, not {rows.dtype} {list(rows.shape)} on {rows.device}"
        )
    _run(CopyRequest(pages, slots, rows.contiguous(), layout, to_pages=True), backend)


@typed
def copy_tokens(
    pages: Tensor, source: Tensor, target: Tensor, *, layout: PageLayout, backend: str | None = None
) -> None:
    """Copies the token in slot ``source[i]`` to slot ``target[i]``, as if all were read before any is written.

    Args:
        pages: uint8 [blocks, num_kv_heads, page_bytes].
        source, target: int32 or int64 [tokens]; pairs with a negative slot are skipped. Targets must be distinct.
    """
    check_slots("source", source, pages.device)
    check_slots("target", target, pages.device)
    if source.shape != target.shape:
        raise InputError(f"{source.shape[0]} source and {target.shape[0]} target slots; there must be as many of both")
    rows = read_tokens(pages, source, layout=layout, backend=backend)
    write_tokens(rows, pages, target.where(source >= 0, -1), layout=layout, backend=backend)


def _run(request: CopyRequest, backend: str | None) -> None:
    if request.slots.shape[0]:
        REGISTRY.select(request.pages.device, request, backend).load().run(request)
