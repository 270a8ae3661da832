"""The attention function ``slimkv``, its registration, and the context manager that switches a model to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.transformers.compat import AttentionInterface, AttentionMaskInterface
from slimkv.integrations.transformers.decoded_attention import dense_attention
from slimkv.integrations.transformers.lazy_kv import PackedStates
from slimkv.integrations.transformers.mask import note_of, slimkv_mask
from slimkv.ops import AttendOptions

NAME = "slimkv"


@dataclass
class Counts:
    """How attention ran inside one ``attention(model)``."""

    fused: int = 0  # on packed pages
    decoded: int = 0  # on decoded keys and values, because of the mask or the layer kind
    plain: int = 0  # on tensors that were never packed (first prefill, raw layers)


_active: list[Counts] = []


def _count(kind: str) -> None:
    for counts in _active:
        setattr(counts, kind, getattr(counts, kind) + 1)


def slimkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as ``AttentionInterface`` calls it: on pages where key and value are packed, dense otherwise.

    Args:
        query: [batch, heads, new, key_dim].
        key, value: what a cache's ``update`` returned, [batch, num_kv_heads, positions, dim].
        attention_mask: [batch, 1, new, positions], boolean or additive, or None for causal order alone.

    Returns the output [batch, new, heads, value_dim], and None for the weights.
    """
    if dropout != 0.0 or position_bias is not None or output_attentions:
        asked = "position_bias" if position_bias is not None else "output_attentions"
        name = "dropout in attention" if dropout != 0.0 else asked
        raise UnsupportedError(f'{NAME} attention has no {name}; use attn_implementation="eager" for it')
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if isinstance(key, PackedStates) and isinstance(value, PackedStates) and key.handle is value.handle:
        handle, note = key.handle, note_of(attention_mask)
        pads = note.pads if note is not None else None
        if (attention_mask is None or note is not None) and handle.refusal(pads) is None:
            _count("fused")
            window = getattr(handle, "window", None) if causal else None
            options = _options(scaling, causal, window, softcap, None if s_aux is None else _matching(s_aux, query))
            return handle.attend(query, options, pads), None
        _count("decoded")
        key, value = key.decoded(), value.decoded()
    else:
        _count("plain")
        key, value = (x.decoded() if isinstance(x, PackedStates) else x for x in (key, value))
    return _dense(query, key, value, attention_mask, _options(scaling, causal, None, softcap, s_aux)), None


def _options(
    scale: float | None, causal: bool, window: int | None, softcap: float | None, sinks: Tensor | None
) -> AttendOptions:
    plain = _plain_options(scale, causal, window, softcap or 0.0)
    return plain if sinks is None else replace(plain, sinks=sinks)


@lru_cache(maxsize=256)
def _plain_options(scale: float | None, causal: bool, window: int | None, softcap: float) -> AttendOptions:
    return AttendOptions(scale, causal, window, softcap)


def _matching(sinks: Tensor, query: Tensor) -> Tensor:
    return sinks.to(query.device).reshape(-1)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttendOptions) -> Tensor:
    """[batch, new, heads, value_dim]; torch's own attention unless the model asks for what it does not have."""
    causal = mask is None and options.causal and query.shape[2] > 1
    if options.softcap or options.sinks is not None:
        if causal:
            shape = query.shape[2], key.shape[2]
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])
        out, _ = dense_attention(
            query, key, value, mask, scale=options.softmax_scale, softcap=options.softcap, sinks=options.sinks
        )
        return out
    if causal and key.shape[2] != query.shape[2]:  # torch aligns causal masks to the first key
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask, causal = mask.tril(key.shape[2] - query.shape[2]), False
    grouped = query.shape[1] != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=options.softmax_scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous()


def register() -> None:
    """Makes ``attn_implementation="slimkv"`` known; may be called any number of times."""
    AttentionInterface.register(NAME, slimkv_attention)
    AttentionMaskInterface.register(NAME, slimkv_mask)


@contextmanager
def attention(model: Any) -> Iterator[Counts]:
    """Inside it ``model`` attends packed pages directly; yields counts of how its attention ran.

    Without it (or with ``model.set_attn_implementation("slimkv")`` for good) stock attention gets decoded tensors.
    """
    register()
    counts = Counts()
    with use_attn_implementation(model, NAME):
        _active.append(counts)
        try:
            yield counts
        finally:
            _active.remove(counts)


@contextmanager
def use_attn_implementation(model: Any, name: str) -> Iterator[None]:
    """Inside it ``model`` attends with the registered function ``name``; afterwards as before."""
    before = {id(part): (part.config, part.config._attn_implementation) for part in _parts(model)}
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise UnsupportedError(
                f"{type(model).__name__} does not let its attention be chosen; its cache works with its own attention"
            )
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation


def _parts(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")]
