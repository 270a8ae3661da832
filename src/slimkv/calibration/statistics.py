"""The statistics of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimkv.calibration.rotary import Rotary
from slimkv.codec import Codec
from slimkv.codec.key_offset import offset_of_keys
from slimkv.errors import InputError


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of one attention layer; the first axis of every tensor is the KV head.

    ``query_moment`` and ``key_mean`` are of queries and keys rotated back to position 0 if the layer has a rotary
    embedding (``rotary``), otherwise of queries and keys as they are.

    ``key_weight`` and ``value_weight`` give the cost of quantisation noise in this layer: key_weight times E(q.e)^2
    over |key|^2 for keys (e is the key's error), and value_weight times |error|^2 over |value|^2 for values. None if
    not measured or if the model's output projection is unknown.
    """

    query_moment: Tensor  # float64 [num_kv_heads, key_dim, key_dim]: mean of q q' over tokens and the group's heads
    value_dim: int
    key_weight: Tensor | None = None  # float64 [num_kv_heads]
    value_weight: Tensor | None = None  # float64 [num_kv_heads]
    rotary: Rotary = field(default_factory=Rotary.none)
    sliding_window: int | None = None
    key_mean: Tensor | None = None  # float64 [num_kv_heads, key_dim]; None: not observed
    first_key: Tensor | None = None  # float64 [num_kv_heads, key_dim]: the mean key at position 0

    def key_offset(self, positions: int, codec: Codec) -> Tensor | None:
        """The key offset for contexts of up to ``positions`` tokens: bfloat16 [num_kv_heads, key_dim]."""
        if self.key_mean is None or self.first_key is None:
            return None
        return offset_of_keys(self.rotary.mean_of_contexts(self.key_mean, positions), self.first_key, codec)

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads."""
        return self.query_moment.shape[0]

    @property
    def key_dim(self) -> int:
        """Size of a key."""
        return self.query_moment.shape[-1]


def pack_moments(moments: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [heads, dim, dim] -> the lower triangles, float16 [heads, dim (dim + 1) / 2], and float32 scales [heads].

    A triangle is divided by its mean diagonal, which is stored as its scale. Entries are then at most ``dim``, and
    their rounding error (2^-11) is small compared with the damping of rounding matrices.
    """
    dim = moments.shape[-1]
    scale = moments.diagonal(dim1=-2, dim2=-1).mean(-1)
    rows, columns = torch.tril_indices(dim, dim)
    safe = torch.where(scale > 0, scale, 1.0)
    return (moments / safe[:, None, None])[:, rows, columns].half().cpu(), scale.float().cpu()


def unpack_moments(packed: Tensor, scale: Tensor) -> Tensor:
    """The inverse of ``pack_moments``, up to float16: float64 [heads, dim, dim], symmetric."""
    count = packed.shape[-1]
    dim = round(((8 * count + 1) ** 0.5 - 1) / 2)
    if dim * (dim + 1) // 2 != count:
        raise InputError(f"{count} values are not the triangle of a matrix")
    rows, columns = torch.tril_indices(dim, dim)
    out = torch.zeros(packed.shape[0], dim, dim, dtype=torch.float64)
    out[:, rows, columns] = packed.double() * scale.double()[:, None]
    return out + out.tril(-1).mT
