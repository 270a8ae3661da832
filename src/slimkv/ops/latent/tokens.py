"""store_latent and gather_latent: latents of new tokens to their slots, and slots to dense latents.

They call ``store_kv`` and ``gather_kv`` with latents as K and rope parts as V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.errors import InputError
from slimkv.ops.batch import PackedKV
from slimkv.ops.checks import check_pair
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.latent.api import checked_latents
from slimkv.ops.store.api import store_kv


@typed
def store_latent(
    latent: Tensor, rope: Tensor, kv: PackedKV, slot_mapping: Tensor, *, backend: str | None = None
) -> None:
    """Encodes and writes new tokens.

    Args:
        latent: [tokens, latent_dim], after its RMS norm; float16, bfloat16 or float32, last axis contiguous.
        rope: [tokens, rope_dim] or [tokens, 1, rope_dim], after the rotary embedding.
        kv: its pages are uint8 [blocks, page_bytes] or [blocks, 1, page_bytes].
        slot_mapping: int32 or int64 [tokens]: block * block_size + position; negative slots are skipped.
        backend: a backend of ``store_kv``; by default the best one for the device.

    The reference raises on NaN or Inf; a kernel marks the token, and attention to it gives NaN.
    """
    kv = checked_latents(kv)
    dims = kv.codec.spec.key_dim, kv.codec.spec.value_dim
    shapes = latent.shape, rope.flatten(1, 2).shape if rope.ndim == 3 else rope.shape
    if any(len(shape) != 2 or shape[1] != dim for shape, dim in zip(shapes, dims, strict=True)):
        raise InputError(
            f"latent must be [tokens, {dims[0]}] and rope [tokens, {dims[1]}], "
            f"not {list(latent.shape)} and {list(rope.shape)}"
        )
    rope = rope if rope.ndim == 3 else rope.unsqueeze(1)
    store_kv(latent.unsqueeze(1), rope, kv, slot_mapping, backend=backend)


@typed
def gather_latent(
    kv: PackedKV, slots: Tensor, *, dtype: torch.dtype = torch.float32, rotated: bool = False,
    out: tuple[Tensor, Tensor] | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decodes the tokens in ``slots``.

    Args:
        kv: its pages are uint8 [blocks, page_bytes] or [blocks, 1, page_bytes].
        slots: int32 or int64 [tokens]: block * block_size + position; a negative slot gives zeros.
        dtype: the dtype of the result if ``out`` is None.
        rotated: whether both parts stay in their stored space.
        out: latent [tokens, latent_dim] and rope [tokens, rope_dim] to write into; rows may be strided.
        backend: a backend of ``gather_kv``; by default the best one for the device.

    Returns latent [tokens, latent_dim] and rope [tokens, rope_dim].
    """
    kv = checked_latents(kv)
    if out is None:
        latent, rope = gather_kv(kv, slots, dtype=dtype, rotated=rotated, backend=backend)
        return latent[:, 0], rope[:, 0]
    check_pair("out", out, "latents and rope parts")
    if out[0].ndim != 2 or out[1].ndim != 2:
        raise InputError(
            f"out must be [tokens, {kv.codec.spec.key_dim}] and [tokens, {kv.codec.spec.value_dim}], "
            f"not {list(out[0].shape)} and {list(out[1].shape)}"
        )
    gather_kv(kv, slots, rotated=rotated, out=(out[0].unsqueeze(1), out[1].unsqueeze(1)), backend=backend)
    return out
