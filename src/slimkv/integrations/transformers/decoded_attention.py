"""Attention on decoded keys and values with the options of fused attention: soft cap, sinks, any boolean mask."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def exact(device: torch.device) -> Any:
    """A context outside autocast, which would round the float32 products of codec and attention to 16 bits."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention in float32.

    Args:
        query: [batch, heads, queries, key_dim]; heads a multiple of the KV heads.
        key, value: [batch, num_kv_heads, keys, dim].
        mask: boolean (True: visible) or additive, broadcastable to [batch, heads, queries, keys]; None: all visible.
        sinks: [heads], a logit per head that joins the softmax's denominator.

    Returns out [batch, queries, heads, value_dim] in the query's dtype and the log-sum-exp [batch, queries, heads].
    A query that sees nothing gets zeros.
    """
    batch, heads, queries, _ = query.shape
    with exact(query.device):
        weights, lse = probabilities(query, key, mask, scale=scale, softcap=softcap, sinks=sinks)
        out = weights.reshape(batch, key.shape[1], -1, weights.shape[-1]) @ value.float()
    out = out.reshape(batch, heads, queries, -1).transpose(1, 2)
    return out.contiguous().to(query.dtype), lse.transpose(1, 2)


def probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, *, scale: float | None, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The softmax of ``dense_attention``, float32 [batch, heads, queries, keys], and its log-sum-exp without the last
    axis.
    """
    batch, heads, queries, dim = query.shape
    grouped = query.float().reshape(batch, key.shape[1], -1, dim)
    scores = grouped @ key.float().transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(dim))
    scores = scores.reshape(batch, heads, queries, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().reshape(1, -1, 1).to(lse.device))
    return torch.exp(scores - lse[..., None].clamp(min=torch.finfo(torch.float32).min)), lse


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> Tensor:
    """Returns [batch, queries, heads, value_dim]; calls torch's own attention unless there is a soft cap or sinks.

    ``causal`` applies without a mask: the last query then sees the last key. ``kwargs``: the options of the call.
    """
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap") or 0.0
    sinks, bias = kwargs.get("s_aux"), kwargs.get("position_bias")
    queries, keys = query.shape[2], key.shape[2]
    causal = causal and mask is None and queries > 1
    if causal and (queries != keys or softcap or sinks is not None or bias is not None):
        # torch aligns causal masks to the first key
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        causal = False
    if bias is not None:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, bias, torch.finfo(query.dtype).min)
        else:
            mask = bias if mask is None else mask + bias
    if softcap or sinks is not None:
        out, _ = dense_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        return out
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()
