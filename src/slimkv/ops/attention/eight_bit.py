"""The arithmetic of prefill on 8-bit tensor cores, in plain torch, and the formats that support it.

For a query q and the tokens t of its sequence, with K and V as the codec stores them (rotated):

    scores     x_t = (sum_d qi_d kb_td) * (scale of key t) / 2 * (scale of q) * softmax_scale * log2(e)
               qi: the rotated query as int8, its largest coordinate 127; kb: twice the key's levels, odd bytes, exact
    weights    w_t = e4m3(2^(x_t - E) v_t), where v_t is the scale of value t and the integer E brings the largest
               into (64, 128]
    output     sum_t w_t ve_t / sum_t w_t / v_t, where ve_t are the value's levels as e4m3 numbers

Sums of int8 products are exact; sums of e4m3 products are in float32. E is an integer, so the rounding of weights does
not depend on it (unless they underflow e4m3), and an implementation may update E at any step. The denominator sums the
rounded weights, so weights are always normalised.

The scale of a value is rounded, to 2^-8 or better, so that its inverse is the sum of two e4m3 digits, from which tensor
cores compute the denominator. In a tile of 128 tokens, values count as zero if their scale is below 2^-12 times the
power of two above the tile's largest scale.

GPUs without warpgroup MMA multiply integers in both products (docs/design/eight-bit-prefill.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.byte_levels import E4M3_LARGEST, MOST_BITS, byte_levels
from slimkv.codec.pack import take_tokens
from slimkv.codec.scale16 import SMALLEST_NORMAL, decode_unsigned
from slimkv.ops.attention.api import AttendRequest
from slimkv.ops.cuda.constants import LOG2E
from slimkv.spec import CodecSpec, Kind, PageLayout

TILE = 128
LEAST_VALUE = 2.0**-12  # relative to the power of two above the largest scale of a tile
MOST_QUOTIENT = 256.0  # the largest ``unit`` / scale in _with_two_digits
TOP = 7  # the largest weight is in (2^(TOP - 1), 2^TOP]


def format_refusal(spec: CodecSpec) -> str | None:
    """Why 8-bit prefill does not support this format, or None; it needs Lloyd-Max codes of up to 4 bits."""
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind != Kind.LLOYD or side.bits > MOST_BITS:
            return (
                f"8-bit attention does not support {name} format {side.name}; it supports Lloyd-Max codes of 1 to "
                f"{MOST_BITS} bits (k4v4, k3v4, ...)"
            )
    return None


def refusal(request: AttendRequest) -> str | None:
    """Why 8-bit prefill does not support this request, or None."""
    if request.fresh is not None:
        return "8-bit attention does not support fresh K and V: it reads new tokens as codes; leave fresh at None"
    return format_refusal(request.layout.spec)


@dataclass(frozen=True)
class Operands:
    """K and V of a sequence as operands of the tensor cores."""

    key: Tensor  # float32 [tokens, num_kv_heads, key_dim]: integers, -127..127
    key_scale: Tensor  # float32 [tokens, num_kv_heads]: the factor on ``key``; NaN where K or V is marked invalid
    value: Tensor  # float32 [tokens, num_kv_heads, value_dim]: numbers of e4m3
    value_scale: Tensor  # float32 [tokens, num_kv_heads], > 0: the factor on ``value``

    def weigh(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator and denominator of the output for scores x, [num_kv_heads, group, queries, tokens].

        The third result is the exponent of 2 that both are relative to.
        """
        value_scale = self.value_scale.T[:, None, None, :]
        x = x + value_scale.log2()
        reference = torch.ceil(x.nan_to_num(-torch.inf).amax(-1, keepdim=True)) - TOP
        reference = torch.where(reference.isinf(), 0.0, reference)
        weights = torch.exp2(x - reference).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).float()
        total = (weights / value_scale).sum(-1, keepdim=True)
        return torch.einsum("hgqk,khd->hgqd", weights, self.value), total, reference


def operands(codec: Codec, layout: PageLayout, pages: Tensor, slots: Tensor, seen_from: int = 0) -> Operands:
    """The operands of the tokens in ``slots``, int64 [tokens]: a whole sequence.

    Tokens before ``seen_from``, which no query attends to, have no effect."""
    spec, device = layout.spec, pages.device
    key, value = take_tokens(layout, pages, slots)
    key_levels = byte_levels(spec.key.bits, spec.key_dim)
    value_levels = byte_levels(spec.value.bits, spec.value_dim)
    key_scale, value_scale = decode_unsigned(key.fields[..., 0]), decode_unsigned(value.fields[..., 0])
    marked = key_scale.isnan() | value_scale.isnan()
    hidden = torch.arange(len(slots), device=device)[:, None] < seen_from
    scale = torch.where(marked | hidden, 0.0, value_scale)
    tiles = torch.nn.functional.pad(scale.T, (0, -len(slots) % TILE)).unflatten(1, (-1, TILE)).amax(-1)
    unit = torch.ldexp(torch.ones_like(tiles), torch.frexp(tiles)[1])  # the power of two above the largest scale
    unit = unit.where(tiles > 0, SMALLEST_NORMAL)
    least = unit.repeat_interleave(TILE, 1)[:, : len(slots)].T * LEAST_VALUE
    zero = scale < least
    levels = torch.tensor(value_levels.value, dtype=torch.float32, device=device)[value.codes.long()]
    return Operands(
        torch.tensor(key_levels.key, dtype=torch.float32, device=device)[key.codes.long()],
        torch.where(marked, torch.nan, key_scale * 0.5),
        torch.where(zero[..., None], 0.0, levels),
        _with_two_digits(torch.where(zero, least, scale), least * MOST_QUOTIENT) / value_levels.value_factor,
    )


def _with_two_digits(scale: Tensor, unit: Tensor) -> Tensor:
    """Scales rounded so that ``unit`` / scale is an e4m3 number plus 2^-5 times another e4m3 number."""
    quotient = unit / scale
    first = quotient.to(torch.float8_e4m3fn).float()
    return unit / (first + ((quotient - first) * 32).to(torch.float8_e4m3fn).float() / 32)


def rounded_queries(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries float32 [..., key_dim] -> integers of int8 (float32) and the scale [...] of each row."""
    largest = rotated.abs().amax(-1)
    up = torch.where(largest > 0, 127 / largest, 0.0)
    return torch.round(rotated * up[..., None]), largest / 127


def attend_sequence(
    query: Tensor, kv: Operands, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None,
    score_shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of rotated queries float32 [queries, num_heads, key_dim] on one sequence.

    ``visible``: bool [queries, tokens]; ``sinks``: float [num_heads] or [queries, num_heads], or None;
    ``score_shift``: float [queries, num_heads], added before the soft cap. Returns the output float32 [queries,
    num_heads, value_dim], still rotated, and the log-sum-exp [num_heads, queries].
    """
    count, heads, _ = query.shape
    kv_heads = kv.key.shape[1]
    rows, row_scale = rounded_queries(query)
    rows = rows.unflatten(1, (kv_heads, -1))
    sums = torch.einsum("qhgd,khd->hgqk", rows, kv.key)  # integers below 2^24: exact
    x = sums * kv.key_scale.T[:, None, None, :]
    x = x * (row_scale.T.unflatten(0, (kv_heads, -1))[..., None] * (scale * LOG2E))
    if score_shift is not None:
        x = x + score_shift.T.unflatten(0, (kv_heads, -1))[..., None] * LOG2E
    if softcap:
        x = softcap * LOG2E * torch.tanh(x / (softcap * LOG2E))
    x = x.masked_fill(~visible, -torch.inf)
    out, total, reference = kv.weigh(x)
    if sinks is not None:
        by_row = sinks[:, None] if sinks.ndim == 1 else sinks.T  # [num_heads, 1 or queries]
        total = total + torch.exp2(by_row.unflatten(0, (kv_heads, -1))[..., None] * LOG2E - reference)
    out = out / torch.where(total == 0, 1.0, total)
    lse = (reference + total.log2()) / LOG2E
    return out.flatten(0, 1).transpose(0, 1).reshape(count, heads, -1), lse.flatten(0, 1)[..., 0]
