"""The integer-only arithmetic of 8-bit prefill on GPUs without warpgroup MMA, in plain torch.

The scores x_t and the scales v_t of the values are those of ``slimkv.ops.attention.eight_bit``:

    weights    w_t = round(2^(x_t - m) 255 v_t / u), where m is the largest x in a group of tokens (``group_tokens``)
               and u the largest v in a tile. A tile is two consecutive groups and starts at a multiple of its size. If
               any v in the tile is below u / 4, m is instead the largest x_t + log2(v_t / u) of the group
    output     (sum over groups of 2^m u / 510 sum_t w_t vb_t) / (sum_t 2^(x_t)), where vb_t is twice the centroids of
               value t, as integers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimkv.codec import Codec
from slimkv.codec.byte_levels import byte_levels
from slimkv.codec.pack import take_tokens
from slimkv.codec.scale16 import SMALLEST_NORMAL, decode_unsigned
from slimkv.ops.attention.eight_bit import Operands, operands
from slimkv.spec import PageLayout

MOST_WEIGHT, UNEVEN, LEAST_LOG = 255.0, 0.25, -15.0
_operands = operands  # tests replace ``eight_bit.operands`` by integer_operands, which calls the original


def group_tokens(key_dim: int) -> int:
    """The number of tokens whose weights share one scale."""
    return 128 if key_dim == 64 else 64


@dataclass(frozen=True)
class IntegerOperands(Operands):
    """K and V of a sequence; values are integers in -127..127."""

    unit: Tensor  # float32 [tokens, num_kv_heads]: the largest scale of a token's tile
    log: Tensor  # the same shape: log2(scale / unit) in tiles with uneven scales, else 0

    def weigh(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like ``Operands.weigh``, but weights are rounded to integers."""
        count, tokens = x.shape[-1], group_tokens(self.key.shape[-1])

        def in_groups(y: Tensor, fill: float = 0.0) -> Tensor:
            return pad(y, (0, -count % tokens), value=fill).unflatten(-1, (-1, tokens))

        x = in_groups(x, -torch.inf)
        most = (x + in_groups(self.log.T)[:, None, None]).nan_to_num(-torch.inf).amax(-1, keepdim=True)
        # A slightly larger maximum, so that rounding errors cannot push a weight beyond 255.
        most = torch.where(most.isinf(), most, most + most.abs() * 2.0**-22)
        reference = most.amax(-2, keepdim=True)
        reference = torch.where(reference.isinf(), 0.0, reference)
        most = torch.where(most.isinf(), reference, most)
        exact, by = torch.exp2(x - most), torch.exp2(most - reference)
        scale = in_groups((MOST_WEIGHT * self.value_scale / self.unit).T)[:, None, None]
        weights = (torch.round(exact * scale) * by).flatten(-2)[..., :count] * self.unit.T[:, None, None] / MOST_WEIGHT
        total = (exact * by).sum(-1).sum(-1, keepdim=True)
        return torch.einsum("hgqk,khd->hgqd", weights, self.value), total, reference[..., 0]


def integer_operands(
    codec: Codec, layout: PageLayout, pages: Tensor, slots: Tensor, seen_from: int = 0
) -> IntegerOperands:
    """Like ``operands``, for integer-only products."""
    plain, (_, value) = _operands(codec, layout, pages, slots, seen_from), take_tokens(layout, pages, slots)
    levels = byte_levels(layout.spec.value.bits, layout.spec.value_dim).key
    hidden = plain.key_scale.isnan() | (torch.arange(len(slots), device=pages.device)[:, None] < seen_from)
    scale = decode_unsigned(value.fields[..., 0]).masked_fill(hidden, 0.0)
    tile = 2 * group_tokens(layout.spec.key_dim)

    def over_tiles(reduce: Callable[..., Tensor], x: Tensor, fill: float) -> Tensor:
        tiles = pad(x.T, (0, -len(x) % tile), value=fill).unflatten(1, (-1, tile))
        return reduce(tiles, -1).repeat_interleave(tile, 1)[:, : len(x)].T

    most = over_tiles(torch.amax, scale, 0.0).clamp(min=SMALLEST_NORMAL)
    least = over_tiles(torch.amin, scale.masked_fill(hidden, torch.inf), torch.inf)
    log = torch.where(least < UNEVEN * most, (scale / most).log2().clamp(min=LEAST_LOG), 0.0)
    values = torch.tensor(levels, dtype=torch.float32, device=pages.device)[value.codes.long()]
    return IntegerOperands(plain.key, plain.key_scale, values, scale * 0.5, most * 0.5, log)
