"""Prefill in the arithmetic of 8-bit tensor cores, in plain torch, and which caches support it.

For a query q and the tokens t of its sequence, with K and V as the codec stores them (rotated):

    scores     x_t = (sum_d qi_d kb_td) * (scale of key t / 2) * (scale of q) * softmax_scale * log2(e)
               qi: the rotated query as int8, its largest coordinate 127; kb: twice the key's levels, odd bytes, exact
    weights    w_t = e4m3(2^(x_t - E) v_t), where v_t is the scale of value t and the integer E brings the largest
               into (64, 128]
    output     sum_t w_t ve_t / sum_t w_t / v_t, where ve_t are the value's levels as e4m3 numbers

Sums are exact in int8 and float32 in e4m3. E is an integer, so the rounding of weights does not depend on it (until
they underflow e4m3), and an implementation may update E whenever it likes. The denominator sums the rounded weights, so
they are always normalised.

The scale of a value is rounded so that its inverse has two digits of e4m3, which the tensor cores sum the weights with:
to 2^-8 and better. A value whose scale is below 2^-12 of the power of two above the largest of its tile of 128 tokens
counts as zero.

GPUs without warpgroup products multiply integers throughout. There, weights are integers relative to the row's largest
score in a group of tokens (``group_tokens``), and values are twice their levels, vb_t, exact:

    weights    w_t = round(2^(x_t - m) 255 v_t / u), where m is the largest x of the group and u the largest v of two
               groups, the first of which starts at a multiple of their size. Where another v of the two is less than
               u / 4, m is the largest x_t + log2(v_t / u): a token with a small value does not use up the bits
    output     sum over groups of 2^m u / 510 sum_t w_t vb_t, over sum_t 2^(x_t)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.byte_levels import E4M3_LARGEST, MOST_BITS, byte_levels
from slimkv.codec.pack import take_tokens
from slimkv.codec.scale16 import SMALLEST_NORMAL, decode_unsigned
from slimkv.ops.attention.api import AttendRequest
from slimkv.spec import CodecSpec, Kind, PageLayout

LOG2E = math.log2(math.e)
TILE = 128
LEAST_VALUE = 2.0**-12  # of the power of two above a tile's largest scale
MOST_QUOTIENT = 256.0  # of the unit of a tile and a scale
TOP = 7  # the largest weight is in (2^(TOP - 1), 2^TOP]
MOST_WEIGHT, UNEVEN, LEAST_LOG = 255.0, 0.25, -60.0  # integers


def format_refusal(spec: CodecSpec) -> str | None:
    """Why this format is not attended in 8 bits, or None; Lloyd-Max codes of up to 4 bits on both sides are."""
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind != Kind.LLOYD or side.bits > MOST_BITS:
            return (
                f"{name} format {side.name} is not attended in 8 bits; Lloyd-Max codes of 1 to {MOST_BITS} bits are "
                "(k4v4, k3v4, ...)"
            )
    return None


def refusal(request: AttendRequest) -> str | None:
    """Why this request is not attended in 8 bits, or None."""
    if request.fresh is not None:
        return "fresh K and V are not attended in 8 bits: new tokens are read through their codes; leave fresh at None"
    return format_refusal(request.layout.spec)


@dataclass(frozen=True)
class Operands:
    """K and V of a sequence as operands of the tensor cores."""

    key: Tensor  # float32 [tokens, num_kv_heads, key_dim]: integers, -127..127
    key_scale: Tensor  # float32 [tokens, num_kv_heads]: a key is ``key`` times it; NaN where K or V is marked invalid
    value: Tensor  # float32 [tokens, num_kv_heads, value_dim]: numbers of e4m3
    value_scale: Tensor  # float32 [tokens, num_kv_heads], > 0: a value is ``value`` times it
    value_unit: Tensor | None = None  # float32 [tokens, num_kv_heads]: integers, the largest scale of a token's tile
    value_log: Tensor | None = None  # the same shape, integers: log2 of scale over unit where scales are uneven, else 0


def group_tokens(key_dim: int) -> int:
    """Integers: the number of tokens whose weights have one scale."""
    return 128 if key_dim == 64 else 64


def operands(
    codec: Codec, layout: PageLayout, pages: Tensor, slots: Tensor, seen_from: int = 0, integers: bool = False
) -> Operands:
    """The tokens in ``slots``, int64 [tokens], which are the whole sequence from its first token on.

    Tokens before ``seen_from``, which no query sees, have no effect. ``integers``: for products of integers alone."""
    spec, device = layout.spec, pages.device
    key, value = take_tokens(layout, pages, slots)
    key_levels = byte_levels(spec.key.bits, spec.key_dim)
    value_levels = byte_levels(spec.value.bits, spec.value_dim)
    key_scale, value_scale = decode_unsigned(key.fields[..., 0]), decode_unsigned(value.fields[..., 0])
    marked = key_scale.isnan() | value_scale.isnan()
    hidden = torch.arange(len(slots), device=device)[:, None] < seen_from
    scale = torch.where(marked | hidden, 0.0, value_scale)
    tile = 2 * group_tokens(spec.key_dim) if integers else TILE
    tiles = torch.nn.functional.pad(scale.T, (0, -len(slots) % tile)).unflatten(1, (-1, tile)).amax(-1)
    keys = torch.tensor(key_levels.key, dtype=torch.float32, device=device)[key.codes.long()]
    key_scale = torch.where(marked, torch.nan, key_scale * 0.5)
    if integers:
        most = tiles.clamp(min=SMALLEST_NORMAL).repeat_interleave(tile, 1)[:, : len(slots)].T
        values = torch.tensor(value_levels.key, dtype=torch.float32, device=device)[value.codes.long()]
        others = torch.nn.functional.pad(
            scale.masked_fill(marked | hidden, torch.inf).T, (0, -len(slots) % tile), value=torch.inf
        )
        least = others.unflatten(1, (-1, tile)).amin(-1).repeat_interleave(tile, 1)[:, : len(slots)].T
        logs = (scale / most).log2().clamp(min=LEAST_LOG)
        return Operands(keys, key_scale, values, scale * 0.5, most * 0.5, torch.where(least < UNEVEN * most, logs, 0.0))
    unit = torch.ldexp(torch.ones_like(tiles), torch.frexp(tiles)[1])  # the power of two above a tile's largest scale
    unit = unit.where(tiles > 0, SMALLEST_NORMAL)
    least = unit.repeat_interleave(TILE, 1)[:, : len(slots)].T * LEAST_VALUE
    zero = scale < least
    levels = torch.tensor(value_levels.value, dtype=torch.float32, device=device)[value.codes.long()]
    return Operands(
        keys,
        key_scale,
        torch.where(zero[..., None], 0.0, levels),
        _with_two_digits(torch.where(zero, least, scale), least * MOST_QUOTIENT) / value_levels.value_factor,
    )


def _with_two_digits(scale: Tensor, unit: Tensor) -> Tensor:
    """Scales rounded so that ``unit`` / scale is the sum of an e4m3 number and 2^-5 of another."""
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
    """Rotated queries float32 [queries, num_heads, key_dim] on a sequence.

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
    out, total, reference = (_weigh if kv.value_unit is None else _weigh_in_integers)(x, kv)
    if sinks is not None:
        by_row = sinks[:, None] if sinks.ndim == 1 else sinks.T  # [num_heads, 1 or queries]
        total = total + torch.exp2(by_row.unflatten(0, (kv_heads, -1))[..., None] * LOG2E - reference)
    out = out / torch.where(total == 0, 1.0, total)
    lse = (reference + total.log2()) / LOG2E
    return out.flatten(0, 1).transpose(0, 1).reshape(count, heads, -1), lse.flatten(0, 1)[..., 0]


def _weigh(x: Tensor, kv: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The products of weights and values, the sum of weights, and the exponent that both are relative to."""
    value_scale = kv.value_scale.T[:, None, None, :]
    x = x + value_scale.log2()
    reference = torch.ceil(x.nan_to_num(-torch.inf).amax(-1, keepdim=True)) - TOP
    reference = torch.where(reference.isinf(), 0.0, reference)
    weights = torch.exp2(x - reference).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).float()
    total = (weights / value_scale).sum(-1, keepdim=True)
    return torch.einsum("hgqk,khd->hgqd", weights, kv.value), total, reference


def _weigh_in_integers(x: Tensor, kv: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The same with weights that are integers: x is [num_kv_heads, group, queries, tokens]."""
    assert kv.value_unit is not None
    assert kv.value_log is not None
    logs = kv.value_log.T[:, None, None, :]
    scale = (MOST_WEIGHT * kv.value_scale / kv.value_unit).T[:, None, None, :]
    tokens = group_tokens(kv.key.shape[-1])
    groups = [slice(at, at + tokens) for at in range(0, x.shape[-1], tokens)]
    most = torch.stack([(x + logs)[..., group].nan_to_num(-torch.inf).amax(-1) for group in groups], -1)
    most = torch.where(most.isinf(), most, most + most.abs() * 2.0**-22)  # rounding makes no weight larger than a byte
    reference = most.amax(-1, keepdim=True)
    reference = torch.where(reference.isinf(), 0.0, reference)
    most = torch.where(most.isinf(), reference, most)
    out, total = torch.zeros(*x.shape[:3], kv.value.shape[-1], device=x.device), torch.zeros_like(reference)
    for i, group in enumerate(groups):
        exact = torch.exp2(x[..., group] - most[..., i, None])
        by = torch.exp2(most[..., i, None] - reference)
        products = torch.einsum("hgqk,khd->hgqd", torch.round(exact * scale[..., group]), kv.value[group])
        out += products * (kv.value_unit[group.start] / MOST_WEIGHT)[:, None, None, None] * by
        total += exact.sum(-1, keepdim=True) * by
    return out, total, reference
