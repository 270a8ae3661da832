"""What every operation checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.spec import PageLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_pages(pages: Tensor, layout: PageLayout) -> None:
    """Raises unless ``pages`` is uint8 [blocks, num_kv_heads, page_bytes] of ``layout``."""
    shape, strides = pages.shape, pages.stride()
    if pages.device.type == "meta":
        raise InputError("pages are on the meta device, which holds no bytes; use a CPU or a GPU")
    if pages.dtype != torch.uint8 or len(shape) != 3 or shape[2] != layout.page_bytes or strides[2] != 1:
        raise InputError(
            f"pages must be uint8 [blocks, num_kv_heads, {layout.page_bytes}] with a contiguous last axis, "
            f"not {pages.dtype} {list(pages.shape)} with strides {list(pages.stride())}"
        )
    if shape[1] == 0:
        raise InputError(f"pages must have at least one KV head, not {list(shape)}")
    if (strides[0] | strides[1] | pages.data_ptr()) % 16:
        raise InputError(f"pages must start at multiples of 16 bytes; the pages' strides are {list(pages.stride())}")
