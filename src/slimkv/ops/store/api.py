"""store: K and V of new tokens -> their slots in the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.codec import Codec
from slimkv.codec.key_offset import check_offset, subtract_offset
from slimkv.errors import InputError
from slimkv.ops.batch import PackedKV, Rounding
from slimkv.ops.checks import check_int32, check_packed, check_slots, check_vectors
from slimkv.ops.registry import Registry
from slimkv.spec import Kind, PageLayout, ScalePolicy


@dataclass(frozen=True)
class StoreRequest:
    """The checked arguments of one ``store``."""

    key: Tensor
    value: Tensor
    pages: Tensor
    slot_mapping: Tensor
    codec: Codec
    layout: PageLayout
    query_aware: Tensor | None = None
    query_aware_index: Tensor | None = None
    key_offset: Tensor | None = None

    @property
    def matrices(self) -> int:
        """The number of query-aware matrices per KV head."""
        return self.query_aware.shape[0] if self.query_aware is not None and self.query_aware.ndim == 4 else 1

    def centred_by(self, backend: Any) -> bool:
        """Whether ``backend`` centres keys itself, or no centring is needed."""
        fuses = getattr(backend, "fuses_offset", None)
        return self.key_offset is None or (fuses is not None and fuses(self))

    def run(self, backend: Any) -> None:
        """Runs a backend; centres keys first unless the backend does."""
        if self.key_offset is None or self.centred_by(backend):
            backend.run(self)
        else:
            backend.run(replace(self, key=subtract_offset(self.key, self.key_offset), key_offset=None))


REGISTRY = Registry.of_kernels(
    "store", "store", cpu="cpu", cuda="cuda.launch", triton="triton.launch", reference="reference"
)


@typed
def store_kv(
    key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None, *,
    backend: str | None = None,
) -> None:  # fmt: skip
    """Encodes and writes new tokens.

    Args:
        key, value: [tokens, num_kv_heads, key_dim / value_dim], float16, bfloat16 or float32, last axis contiguous.
        slot_mapping: int32 or int64 [tokens]: block * block_size + position; negative slots are skipped.
        rounding: query-aware rounding of keys; None rounds to the nearest level.
        backend: the name of a backend; by default the best one for the device.

    The reference raises on NaN or Inf. A kernel cannot raise: it marks the token, and attention to it gives NaN.
    """
    request = checked_request(key, value, kv, slot_mapping, rounding)
    request.run(REGISTRY.select(request.pages.device, request, backend).load())


def checked_request(
    key: Tensor, value: Tensor, kv: PackedKV, slot_mapping: Tensor, rounding: Rounding | None = None
) -> StoreRequest:
    """The arguments of ``store_kv``, checked."""
    pages, layout, key_offset = kv.pages, kv.layout, kv.key_offset
    check_packed(kv)
    heads, device, spec = pages.shape[1], pages.device, layout.spec
    check_vectors("key", key, ("tokens", heads, spec.key_dim), device)
    check_vectors("value", value, ("tokens", heads, spec.value_dim), device)
    check_slots("slot_mapping", slot_mapping, device)
    if not key.shape[0] == value.shape[0] == slot_mapping.shape[0]:
        raise InputError(f"{key.shape[0]} keys, {value.shape[0]} values and {slot_mapping.shape[0]} slots do not match")
    if key_offset is not None:
        check_offset(key_offset, spec, heads, device)
    matrices, index = (None, None) if rounding is None else (rounding.matrices, rounding.index)
    if matrices is not None:
        _check_matrices(matrices, pages, layout)
        if index is not None:
            check_int32("index", index, slot_mapping.shape, device)
        elif matrices.ndim == 4 and matrices.shape[0] > 1:
            raise InputError(
                f"rounding has {matrices.shape[0]} matrices by position: give Rounding.index, one entry per token"
            )
    return StoreRequest(key, value, pages, slot_mapping, kv.codec, layout, matrices, index, key_offset)


def _check_matrices(matrices: Tensor, pages: Tensor, layout: PageLayout) -> None:
    spec, heads = layout.spec, pages.shape[1]
    if spec.key.kind != Kind.LLOYD:
        raise InputError(f"rounding needs Lloyd-Max keys; the key format is {spec.key.name}: pass rounding=None")
    wanted = (heads, spec.key_dim, spec.key_dim)
    fits = matrices.shape[-3:] == wanted and matrices.ndim in (3, 4) and matrices.numel() > 0
    if matrices.dtype != torch.int8 or not fits or matrices.device != pages.device:
        raise InputError(
            f"matrices must be int8 {list(wanted)}, or several of them, on {pages.device}, "
            f"not {matrices.dtype} {list(matrices.shape)} on {matrices.device}"
        )
    if not matrices.is_contiguous() or matrices.data_ptr() % 16:
        raise InputError("matrices must be contiguous and start at a multiple of 16 bytes")


@cache
def refuses_policy(layout: PageLayout) -> str | None:
    """Why kernels do not support the scale policies of a layout, or None; they only support ``norm``."""
    for name, side in (("key_policy", layout.key), ("value_policy", layout.value)):
        policy = side.format.policy
        if side.format.kind == Kind.LLOYD and policy != ScalePolicy.NORM:
            return f"kernels encode with the scale policy 'norm'; {name}={str(policy)!r} needs backend='reference'"
    return None


def refuses_raw_dtype(request: StoreRequest) -> str | None:
    """Why raw sides cannot hold the request's K and V, or None."""
    spec = request.layout.spec
    for name, fmt, x in (("key", spec.key, request.key), ("value", spec.value, request.value)):
        if fmt.kind == Kind.RAW and str(x.dtype) != f"torch.{fmt.raw_dtype}":
            return f"the raw format stores {fmt.raw_dtype} bit for bit, but the {name} is {x.dtype}"
    return None
