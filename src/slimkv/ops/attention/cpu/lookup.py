"""attend on a CPU: whole blocks decoded by table lookup, then matrix products in the order of the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.ops.attention.api import AttendRequest, refuses_eight_bit, refuses_split_arguments
from slimkv.ops.attention.reference import each_sequence, visible
from slimkv.ops.cpu.block_decoder import Decoded, decode_side

FEW_QUERIES = 16  # up to here one pass over the scores; above, torch's blocked attention


def supports(request: AttendRequest) -> str | None:
    """Every format, size and option; keys are read in one go."""
    return refuses_split_arguments(request) or refuses_eight_bit(request)


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    each_sequence(request, _one_sequence)


def _one_sequence(request: AttendRequest, sequence: int, length: int, rows: slice) -> None:
    seen = _first_seen(request, length, rows.stop - rows.start)
    first = seen // request.layout.block_size
    blocks = request.block_table[sequence, first : request.layout.blocks_for(length)]
    if request.fresh is not None:
        blocks = blocks.clamp(0, request.pages.shape[0] - 1)  # those of the new tokens, which are not read
    pages = request.pages.index_select(0, blocks)
    # What is left of the sequence: distances stay what they are. A token that nobody sees may hold a NaN.
    skip, length = seen - first * request.layout.block_size, length - first * request.layout.block_size
    key = decode_side(pages, request.layout, request.codec, transposed=False).part(skip, length)
    value = decode_side(pages, request.layout, request.codec, transposed=True).part(skip, length)
    length -= skip
    query = request.codec.rotate_query(request.query[rows])  # [queries, heads, dim]
    options, count = request.options, rows.stop - rows.start
    special = (
        options.softcap or options.sinks is not None or options.sliding_window is not None or request.lse is not None
    )
    if count <= FEW_QUERIES or special:
        out, lse = _explicit(request, query, key, value, length, rows)
        if request.lse is not None:
            request.lse[rows] = lse
    else:
        out = _blocked(request, query, key, value, length, rows)
    request.out[rows] = request.codec.unrotate_output(out).to(request.out.dtype)


def _first_seen(request: AttendRequest, length: int, queries: int) -> int:
    """The first token that the window of the earliest query reaches."""
    if request.options.sliding_window is None:
        return 0
    return max(length - queries - request.options.sliding_window + 1, 0)


def _fresh(request: AttendRequest, rows: slice, side: int) -> Tensor:
    """The new tokens' raw K or V in its stored space: float32 [num_kv_heads, queries, dim]."""
    assert request.fresh is not None
    rotate = request.codec.rotate_value if side else request.codec.rotate_query
    return rotate(request.fresh[side][rows]).transpose(0, 1)


def _scores(query: Tensor, key: Decoded) -> Tensor:
    """query [num_kv_heads, rows, dim] -> q.k: [num_kv_heads, rows, tokens]."""
    ordered = query if key.order is None else query[..., key.order]
    scores = ordered @ key.numbers.transpose(1, 2)
    if key.scale is not None:
        scores = scores * key.scale[:, None, :]
    if key.zero is not None:
        scores = scores + query.sum(-1, keepdim=True) * key.zero[:, None, :]
    return scores


def _weighted(weights: Tensor, value: Decoded) -> Tensor:
    """weights [num_kv_heads, rows, tokens] -> sum of weights times v: [num_kv_heads, rows, dim]."""
    scaled = weights if value.scale is None else weights * value.scale[:, None, :]
    out = scaled @ value.numbers
    if value.zero is not None:
        out = out + (weights * value.zero[:, None, :]).sum(-1, keepdim=True)
    if value.order is None:
        return out
    ordered = torch.empty_like(out)
    ordered[..., value.order] = out
    return ordered


def _explicit(
    request: AttendRequest, query: Tensor, key: Decoded, value: Decoded, length: int, rows: slice
) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, dim] and log-sum-exp [queries, heads], through the whole score matrix."""
    count, heads = query.shape[:2]
    num_kv_heads, group = request.pages.shape[1], request.group
    grouped = query.reshape(count, num_kv_heads, group, -1).permute(1, 2, 0, 3).reshape(num_kv_heads, group * count, -1)
    old = length - min(count, length)
    if request.fresh is None:
        scores = _scores(grouped, key)
    else:
        fresh_key = _fresh(request, rows, 0)[:, count - (length - old) :]
        scores = torch.cat([_scores(grouped, key.first(old)), grouped @ fresh_key.transpose(1, 2)], -1)
    scores = scores * request.softmax_scale
    if request.options.softcap:
        scores = request.options.softcap * torch.tanh(scores / request.options.softcap)
    if count > 1 or request.options.sliding_window is not None:
        hidden = ~visible(request, length, count)
        scores = scores.unflatten(1, (group, count)).masked_fill(hidden, -torch.inf).flatten(1, 2)
    lse = scores.logsumexp(-1)
    if request.options.sinks is not None:
        sinks = request.options.sinks.float().reshape(num_kv_heads, group).repeat_interleave(count, 1)
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(scores - lse[..., None])
    if request.fresh is None:
        out = _weighted(weights, value)
    else:
        fresh_value = _fresh(request, rows, 1)[:, count - (length - old) :]
        out = _weighted(weights[..., :old], value.first(old)) + weights[..., old:] @ fresh_value
    out = out.unflatten(1, (group, count)).permute(2, 0, 1, 3).reshape(count, heads, -1)
    return out, lse.unflatten(1, (group, count)).permute(2, 0, 1).reshape(count, heads)


def _blocked(request: AttendRequest, query: Tensor, key: Decoded, value: Decoded, length: int, rows: slice) -> Tensor:
    """Output [queries, heads, dim] of many queries, without the whole score matrix."""
    count, causal = query.shape[0], request.options.causal
    keys, values = key.values(), value.values()
    old = length - min(count, length)
    if request.fresh is not None:
        skip = count - (length - old)
        keys = torch.cat([keys[:, :old], _fresh(request, rows, 0)[:, skip:]], 1)
        values = torch.cat([values[:, :old], _fresh(request, rows, 1)[:, skip:]], 1)
    mask = visible(request, length, count) if causal and count != length else None
    group = request.group
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.repeat_interleave(group, 0)[None],
        values.repeat_interleave(group, 0)[None],
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=request.softmax_scale,
    )
    return out[0].transpose(0, 1)
