"""store: K and V of new tokens -> their slots in the pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.cuda import where_cuda_runs
from slimkv.ops.registry import Implementation, Registry, anywhere, on_cpu, where_triton_runs
from slimkv.spec import Kind, PageLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class StoreRequest:
    """The checked arguments of one ``store``."""

    key: Tensor
    value: Tensor
    pages: Tensor
    slot_mapping: Tensor
    codec: Codec
    layout: PageLayout
    rounding: Tensor | None = None


REGISTRY = Registry(
    "store",
    [
        Implementation("cpu", "slimkv.ops.store.cpu", on_cpu),
        Implementation("cuda", "slimkv.ops.store.cuda", where_cuda_runs),
        Implementation("triton", "slimkv.ops.store.triton", where_triton_runs),
        Implementation("reference", "slimkv.ops.store.reference", anywhere),
    ],
)


def store(
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    slot_mapping: Tensor,
    *,
    codec: Codec,
    layout: PageLayout,
    rounding: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Encodes and writes new tokens.

    Args:
        key, value: [tokens, kv_heads, key_dim / value_dim], float16, bfloat16 or float32, last axis contiguous.
        pages: uint8 [blocks, kv_heads, region_bytes], last axis contiguous.
        slot_mapping: int32 or int64 [tokens]: block * block_tokens + position; negative slots are skipped.
        rounding: int8 [kv_heads, key_dim, key_dim], contiguous, from ``slimkv.codec.rounding.rounding_matrix``: keys
            (which must be lloyd) are rounded with the error moved to where no query looks. None rounds to the nearest.
        impl: an implementation's name; by default the best one for the device.

    A NaN or Inf raises in the reference; a kernel cannot raise and marks that token,
    so that whoever attends it gets NaN.
    """
    check_pages(pages, layout)
    heads, device, spec = pages.shape[1], pages.device, layout.spec
    for name, x, dim in (("key", key, spec.key_dim), ("value", value, spec.value_dim)):
        shape = x.shape
        if len(shape) != 3 or shape[1] != heads or shape[2] != dim:
            raise InputError(f"{name} must be [tokens, {heads}, {dim}] for these pages, not {list(shape)}")
        if x.dtype not in FLOATS:
            raise InputError(f"{name} dtype {x.dtype} is not supported; use float16, bfloat16 or float32")
        if x.stride(-1) != 1:
            raise InputError(f"{name} must be contiguous in its last axis (stride {x.stride(-1)})")
        if x.device != device:
            raise InputError(f"{name} is on {x.device}, the pages on {device}")
    if slot_mapping.ndim != 1 or slot_mapping.dtype not in _INTEGERS or slot_mapping.device != device:
        raise InputError(
            f"slot_mapping must be int32 or int64 [tokens] on {device}, "
            f"not {slot_mapping.dtype} {list(slot_mapping.shape)} on {slot_mapping.device}"
        )
    if not key.shape[0] == value.shape[0] == slot_mapping.shape[0]:
        raise InputError(f"{key.shape[0]} keys, {value.shape[0]} values and {slot_mapping.shape[0]} slots do not match")
    if rounding is not None:
        _check_rounding(rounding, pages, layout)
    request = StoreRequest(key, value, pages, slot_mapping, codec, layout, rounding)
    REGISTRY.select(device, request, impl).load().run(request)


def _check_rounding(rounding: Tensor, pages: Tensor, layout: PageLayout) -> None:
    spec, heads = layout.spec, pages.shape[1]
    if spec.key.kind != Kind.LLOYD:
        raise InputError(f"query-aware rounding is for lloyd keys; these are {spec.key.word}: pass rounding=None")
    wanted = (heads, spec.key_dim, spec.key_dim)
    if rounding.dtype != torch.int8 or rounding.shape != wanted or rounding.device != pages.device:
        raise InputError(
            f"rounding must be int8 {list(wanted)} on {pages.device}, "
            f"not {rounding.dtype} {list(rounding.shape)} on {rounding.device}"
        )
    if not rounding.is_contiguous() or rounding.data_ptr() % 16:
        raise InputError("rounding must be contiguous and start at a multiple of 16 bytes")


def check_pages(pages: Tensor, layout: PageLayout) -> None:
    """Raises unless ``pages`` is uint8 [blocks, kv_heads, region_bytes] of ``layout``."""
    shape, strides = pages.shape, pages.stride()
    if pages.dtype != torch.uint8 or len(shape) != 3 or shape[2] != layout.region_bytes or strides[2] != 1:
        raise InputError(
            f"pages must be uint8 [blocks, kv_heads, {layout.region_bytes}] with a contiguous last axis, "
            f"not {pages.dtype} {list(pages.shape)} with strides {list(pages.stride())}"
        )
    if (strides[0] | strides[1] | pages.data_ptr()) % 16:
        raise InputError(f"regions must start at multiples of 16 bytes; the pages' strides are {list(pages.stride())}")
