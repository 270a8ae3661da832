"""gather: pages -> dense K and V, for an engine's own attention, for offload and for debugging."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.codec import Codec
from slimkv.codec.key_offset import check_offset
from slimkv.ops.batch import PackedKV
from slimkv.ops.checks import check_packed, check_pair, check_slots, check_vectors
from slimkv.ops.registry import Registry
from slimkv.spec import PageLayout


@dataclass(frozen=True)
class GatherRequest:
    """The checked arguments of one ``gather``."""

    pages: Tensor
    slots: Tensor
    key: Tensor
    value: Tensor
    codec: Codec
    layout: PageLayout
    rotated: bool
    key_offset: Tensor | None = None  # [heads, key_dim], for a kernel that adds it (``FUSES_OFFSET``)


REGISTRY = Registry.of_kernels("gather", "gather", cpu="cpu", triton="triton", reference="reference")


@typed
def gather_kv(
    kv: PackedKV, slots: Tensor, *, dtype: torch.dtype = torch.float32, rotated: bool = False,
    out: tuple[Tensor, Tensor] | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decodes the tokens in ``slots``; a key offset is added back, in float32.

    Args:
        slots: int32 or int64 [tokens]: block * block_size + position; a negative slot gives zeros.
        dtype: the dtype of the result if ``out`` is None.
        rotated: whether K and V stay in their stored (rotated) space.
        out: K [tokens, num_kv_heads, key_dim] and V [tokens, num_kv_heads, value_dim] to write into.

    Returns K and V.
    """
    pages, codec, layout, key_offset = kv.pages, kv.codec, kv.layout, kv.key_offset
    check_packed(kv)
    check_slots("slots", slots, pages.device)
    shapes = [(len(slots), pages.shape[1], dim) for dim in (layout.spec.key_dim, layout.spec.value_dim)]
    if out is not None:
        check_pair("out", out)
    key, value = out if out is not None else (torch.empty(s, dtype=dtype, device=pages.device) for s in shapes)
    check_vectors("out key", key, shapes[0], pages.device)
    check_vectors("out value", value, shapes[1], pages.device)
    request = GatherRequest(pages, slots, key, value, codec, layout, rotated)
    module = REGISTRY.select(pages.device, request, backend).load()
    if key_offset is None:
        module.run(request)
        return key, value
    check_offset(key_offset, layout.spec, pages.shape[1], pages.device)
    if getattr(module, "FUSES_OFFSET", False):
        module.run(replace(request, key_offset=key_offset))
        return key, value
    centred = torch.empty(shapes[0], dtype=torch.float32, device=pages.device)
    module.run(replace(request, key=centred))
    back = codec.rotate_query(key_offset) if rotated else key_offset
    key.copy_(centred.add_(back).masked_fill_((slots < 0)[:, None, None], 0.0))  # in place: an offload is large
    return key, value
