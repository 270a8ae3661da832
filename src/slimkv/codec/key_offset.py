"""Centred keys: a constant vector per KV head is subtracted before keys are encoded.

Keys have a large constant part: a bias, or a mean that the model learnt. The quantisation error is proportional to the
vector's norm, so a large constant hides the differences between keys. Softmax is invariant to it: with k = k' + c,
every score of a query changes by the same softmax_scale * q.c. Soft caps, sinks and a returned log-sum-exp depend on
absolute scores; for those, this shift per query and head is added back (``score_shift``).

Only keys are centred, never values, and only those stored as Lloyd-Max codes or fp8. Any constant works, so offsets are
bfloat16. Every backend stores the same bytes: a difference is computed in float32 and rounded once to the keys' dtype.
For bfloat16 keys, kernels subtract two numbers at a time in bfloat16, which rounds the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.codec.codec import Codec
from slimkv.errors import InputError
from slimkv.formats import Kind
from slimkv.spec import CodecSpec

OFFSET_DTYPE = torch.bfloat16
_STOCK = "turboquant_"  # vLLM's recipes, which store keys exactly as vLLM does


def takes_offset(spec: CodecSpec) -> bool:
    """Whether keys of this format can be centred."""
    return spec.key.kind in (Kind.LLOYD, Kind.FP8)


def wants_offset(spec: CodecSpec) -> bool:
    """Whether an engine centres keys of this format: every format that allows it, except vLLM's own recipes."""
    return takes_offset(spec) and not spec.format.startswith(_STOCK)


def offset_of_keys(mean: Tensor, first: Tensor, codec: Codec) -> Tensor:
    """The offset for keys with mean ``mean`` and with ``first`` at position 0: bfloat16 [heads, key_dim] on the CPU.

    Most queries attend to the first key, so its error matters most. The offset is the mean, moved by that error: the
    first key minus the offset is then a vector that codes represent exactly, however keys are rounded. The other keys
    hardly change, because the offset moves by a fraction of its distance from the first key.

    Args:
        mean, first: float [heads, key_dim], any device.
        codec: encodes the keys. The offset is computed on the CPU, because stored bytes depend on it.
    """
    codec, mean, first = codec.to("cpu"), mean.cpu().float(), first.cpu().float()
    stored = codec.decode_key(codec.encode_key(first - mean, mark_invalid=True)).float()
    offset = first - stored
    return torch.where(offset.isfinite(), offset, mean).to(OFFSET_DTYPE).contiguous()


def subtract_offset(key: Tensor, offset: Tensor) -> Tensor:
    """[..., num_kv_heads, key_dim] minus bfloat16 [num_kv_heads, key_dim], in the keys' dtype."""
    return (key.float() - offset).to(key.dtype)


def score_shift(query: Tensor, offset: Tensor, softmax_scale: float, deterministic: bool = False) -> Tensor:
    """How much centring lowers every score of a query.

    query [queries, num_heads, key_dim], offset bfloat16 [num_kv_heads, key_dim] -> float32 [queries, num_heads].
    ``deterministic``: the shift of a query does not depend on the number of queries, as it could in a GEMM.
    """
    grouped, offset = query.float().unflatten(1, (offset.shape[0], -1)), offset.float()
    if not deterministic:
        return (torch.einsum("qhgd,hd->qhg", grouped, offset) * softmax_scale).flatten(1)
    sums = grouped * offset[:, None]
    while (dim := sums.shape[-1]) > 1:  # elementwise, in an order that does not depend on the number of queries
        half = dim // 2
        sums = torch.cat([sums[..., :half] + sums[..., half : 2 * half], sums[..., 2 * half :]], -1)
    return (sums[..., 0] * softmax_scale).flatten(1)


def check_offset(offset: Tensor, spec: CodecSpec, num_kv_heads: int, device: torch.device) -> None:
    """Raises unless ``offset`` can centre the keys of these pages."""
    wanted = (num_kv_heads, spec.key_dim)
    if (
        offset.dtype != OFFSET_DTYPE
        or offset.shape != wanted
        or offset.device != device
        or not offset.is_contiguous()
        or (offset.is_cuda and offset.data_ptr() % 16)  # kernels load 16 bytes at a time
    ):
        raise InputError(
            f"key_offset must be contiguous bfloat16 {list(wanted)} on {device} (on a GPU at a multiple of 16 bytes), "
            f"not {offset.dtype} {list(offset.shape)} on {offset.device}"
        )
    if not takes_offset(spec):
        raise InputError(f"keys of format {spec.format} cannot be centred: leave key_offset at None")
