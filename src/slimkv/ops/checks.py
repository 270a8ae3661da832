"""Argument checks shared by all operations."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.arguments import describe
from slimkv.errors import InputError
from slimkv.ops.batch import PackedKV
from slimkv.spec import PageLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_vectors(name: str, x: Tensor, axes: tuple[int | str, ...], device: torch.device) -> None:
    """Raises unless x is a float tensor with these axes (a name allows any size) on ``device``, the last contiguous."""
    fits = len(x.shape) == len(axes)
    if not fits or any(isinstance(axis, int) and x.shape[i] != axis for i, axis in enumerate(axes)):
        raise InputError(f"{name} must be [{', '.join(map(str, axes))}] for these pages, not {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise InputError(f"{name} dtype {x.dtype} is not supported; use float16, bfloat16 or float32")
    if x.stride(-1) != 1:
        raise InputError(f"{name} must be contiguous in its last axis (stride {x.stride(-1)})")
    if x.device != device:
        raise InputError(f"{name} is on {x.device}, the pages on {device}")


def check_int32(name: str, x: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raises unless x is contiguous int32 of this shape on ``device``."""
    if x.dtype != torch.int32 or x.shape != shape or x.device != device or not x.is_contiguous():
        strides = f" with strides {list(x.stride())}" if not x.is_contiguous() else ""
        raise InputError(f"{name} must be contiguous int32 {list(shape)} on {device}, not {describe(x)}{strides}")


def check_pair(name: str, given: tuple[Tensor, Tensor], of: str = "K and V") -> None:
    """Raises unless ``given`` is two tensors."""
    if len(given) != 2 or not all(isinstance(x, Tensor) for x in given):
        raise InputError(f"{name} must be a pair of tensors, {of}, not {describe(given)}")


def check_lse(lse: Tensor | None, total: int, heads: int, device: torch.device) -> None:
    """Raises unless ``lse`` is None or contiguous float32 [total, heads] on ``device``."""
    if lse is None:
        return
    if lse.shape != (total, heads) or lse.dtype != torch.float32 or lse.device != device or not lse.is_contiguous():
        raise InputError(f"lse must be contiguous float32 [{total}, {heads}] on {device}, not {describe(lse)}")


def workspace_of(given: Tensor | None, need: int, device: torch.device) -> Tensor:
    """A workspace of at least ``need`` bytes: ``given``, checked, or a new one on ``device``."""
    if given is None:
        return torch.empty(need, dtype=torch.uint8, device=device)
    if given.dtype != torch.uint8 or given.numel() < need or not given.is_contiguous() or given.data_ptr() % 16:
        raise InputError(
            f"workspace must be contiguous uint8 of at least {need} bytes, 16-byte aligned; it has {given.numel()}"
        )
    return given


def check_slots(name: str, slots: Tensor, device: torch.device) -> None:
    """Raises unless ``slots`` is int32 or int64 [tokens] on ``device``."""
    if slots.ndim != 1 or slots.dtype not in INTEGERS or slots.device != device:
        given = f"{slots.dtype} {list(slots.shape)} on {slots.device}"
        raise InputError(f"{name} must be int32 or int64 [tokens] on {device}, not {given}")


def check_slot_range(name: str, slots: Tensor, pages: Tensor, layout: PageLayout, least: int | None = None) -> None:
    """Raises for a slot beyond the pages, or below ``least``; only on a CPU, where that needs no synchronisation."""
    if slots.device.type != "cpu" or not slots.numel():
        return
    limit, found = pages.shape[0] * layout.block_size, int(slots.max())
    if least is not None and int(slots.min()) < least:
        raise InputError(f"{name} has slot {int(slots.min())}; the smallest valid slot is {least}")
    if found >= limit:
        raise InputError(
            f"{name} has slot {found}, beyond the pages' {limit} slots; slots are block * block_size + position, "
            "negative ones are skipped"
        )


def check_packed(kv: PackedKV) -> None:
    """Raises unless codec and layout have the same spec and the pages are of this layout."""
    if kv.layout.spec is not kv.codec.spec and kv.layout.spec != kv.codec.spec:
        raise InputError(
            f"the layout is of {kv.layout.spec} and the codec of {kv.codec.spec}: use the same spec for both"
        )
    check_pages(kv.pages, kv.layout)


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
