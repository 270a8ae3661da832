"""The attention function ``slimkv``: reads packed pages if it can, and otherwise calls the model's own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.transformers import compat, stock_attention
from slimkv.integrations.transformers.decoded_attention import exact, masked_attention
from slimkv.integrations.transformers.layers import unchecked_layer
from slimkv.integrations.transformers.lazy_kv import LazyKV, PackedStates
from slimkv.integrations.transformers.mask import Pattern, pattern_of, slimkv_mask
from slimkv.integrations.transformers.switching import NAME, count, stock_of
from slimkv.ops import AttendOptions
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES

OBSERVED = "slimkv_observed"  # the name of attention inside ``observed_attention``
# The arguments of an attention function. Any other argument that is set raises an error: it may change the result.
_HANDLED = {"position_bias", "output_attentions", "softcap", "s_aux", "sliding_window"}
_NO_INFLUENCE = {"cache_position", "deterministic", "use_cache", "return_dict", "labels", "logits_to_keep"}
# transformers' SDPA function ignores soft cap and sinks, so a model that uses it must get neither on packed pages.
TORCH_ATTENTION = compat.ALL_ATTENTION_FUNCTIONS[stock_attention.SDPA]
KNOWN_ARGUMENTS = frozenset(_HANDLED | _NO_INFLUENCE | compat.FORWARD_ARGUMENTS)


def slimkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as ``AttentionInterface`` calls it.

    Args:
        query: [batch, heads, new, key_dim].
        key, value: the result of a cache's ``update``, [batch, num_kv_heads, positions, dim].
        attention_mask: [batch, 1, new, positions], boolean or additive; None: ``is_causal`` alone.

    Returns the output [batch, new, heads, value_dim], and the probabilities if the model's own attention returns them.
    """
    if torch.compiler.is_compiling():
        return _outside_the_graph(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    _check_arguments(module, kwargs)
    config = getattr(module, "config", None)
    stock = stock_of(config)
    function = stock_attention.stock_function(type(module), stock) if stock is not None else None  # type: ignore[arg-type]
    kv = _packed(key, value)
    if (layer := unchecked_layer(key)) is not None:
        layer.check_scores(query, scaling if scaling is not None else query.shape[-1] ** -0.5)
    if kv is not None:
        pattern = _pattern(module, query, kv, attention_mask, is_causal, stock)
        asked = kwargs if function is not TORCH_ATTENTION else {**kwargs, "softcap": None, "s_aux": None}
        options = _options(query, scaling, pattern, dropout, asked, kv) if pattern is not None else None
        if pattern is not None and options is not None and kv.attends(pattern.pads):
            count("fused", config)
            with exact(query.device):
                return kv.attend(query, options, pattern.pads), None
        _check_decoding(kv)
    else:
        count("plain", config)
    key, value = (x.decoded() if isinstance(x, PackedStates) else x for x in (key, value))
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    if function is None:  # the module's own attention is not known
        for name in ("dropout", "output_attentions"):
            if arguments.get(name):
                raise UnsupportedError(f'{NAME} attention does not support {name}; use attn_implementation="eager"')
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return masked_attention(query, key, value, attention_mask, causal, arguments), None
    if is_causal is None:
        del arguments["is_causal"]
    return function(module, query, key, value, attention_mask, **arguments)


@torch.compiler.disable
def _outside_the_graph(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``slimkv_attention`` for a model that ``torch.compile`` is tracing."""
    return slimkv_attention(*args, **kwargs)


def _check_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name not in KNOWN_ARGUMENTS and value is not None and value is not False:
            if name == "cache":
                raise UnsupportedError(
                    "continuous batching (generate_batch) has its own paged cache, "
                    "which slimkv does not pack; use generate with a SlimKVCache, or leave slimkv off"
                )
            raise UnsupportedError(
                f"{type(module).__name__} passes {name!r} to its attention, which {NAME} attention does not support; "
                "leave slimkv.attention off for this model: a SlimKVCache also works with its own attention"
            )


def _packed(key: Tensor, value: Tensor) -> LazyKV | None:
    """The packed layer behind the keys and values of a call."""
    if not (isinstance(key, PackedStates) and isinstance(value, PackedStates)):
        return None
    return key.kv if key.kv is value.kv and (key.side, value.side) == (0, 1) else None


def _pattern(
    module: torch.nn.Module, query: Tensor, kv: LazyKV, mask: Tensor | None, is_causal: bool | None, stock: str | None
) -> Pattern | None:
    """The pattern equivalent to ``mask``, or None if attention on pages cannot implement it."""
    if query.shape[2] != kv.new or query.shape[0] != len(kv.pads):
        return None
    if mask is not None:
        return pattern_of(mask, kv) if isinstance(mask, Tensor) else None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # Without a mask, a single query sees all keys. For several, torch's attention is causal and eager attention is not.
    if kv.new == 1 or (causal and stock != stock_attention.EAGER and (kv.window is None or kv.positions <= kv.window)):
        return Pattern(None, kv.window)
    return None


def _check_decoding(kv: LazyKV) -> None:
    """Raises if the settings require attention on pages, which this call does not allow."""
    if kv.prefill == EIGHT_BIT and kv.new > MAX_DECODE_QUERIES:
        raise UnsupportedError(
            "prefill='8bit' is for attention on pages, and this call's mask or arguments need decoded keys and values; "
            "leave prefill at 'auto'"
        )
    if kv.deterministic:
        raise UnsupportedError(
            "deterministic is for attention on pages, and this call's mask or arguments need decoded keys and values"
        )


def _options(
    query: Tensor, scaling: object, pattern: Pattern, dropout: float, kwargs: dict[str, Any], kv: LazyKV
) -> AttendOptions | None:
    """The options of ``attend``; None if it does not support the call."""
    wanted = compat.collector.get() or ()  # what the forward pass returns, by its arguments or the config
    if dropout or kwargs.get("position_bias") is not None or kwargs.get("output_attentions") or "attentions" in wanted:
        return None
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if not isinstance(scaling, int | float | None) or not isinstance(softcap, int | float | None):
        return None
    plain = _plain_options(scaling, pattern.window, softcap or 0.0, kv.prefill, kv.deterministic)
    if sinks is None:
        return plain
    if sinks.numel() != query.shape[1]:
        return None
    return replace(plain, sinks=sinks.to(query.device).reshape(-1))


@lru_cache(maxsize=256)
def _plain_options(
    scale: float | None, window: int | None, softcap: float, prefill: str, deterministic: bool
) -> AttendOptions:
    return AttendOptions(scale, True, window, softcap, prefill=prefill, deterministic=deterministic)


def register() -> None:
    """Registers ``attn_implementation="slimkv"``; may be called any number of times."""
    compat.AttentionInterface.register(NAME, slimkv_attention)
    compat.AttentionMaskInterface.register(NAME, slimkv_mask)


@contextmanager
def observed_attention(model: Any, observe: Callable[..., Tensor]) -> Iterator[None]:
    """Inside the context, ``observe`` is called for every attention call of ``model``'s text decoder.

    It gets the output [batch, new, heads, value_dim] and then the arguments of ``slimkv_attention``, and returns the
    output that the model gets.
    """
    before = [(config, config._attn_implementation) for config in stock_attention.switchable_configs(model)]
    if not before:
        raise UnsupportedError(
            f"the attention of {type(model).__name__} does not go through transformers' attention interface"
        )
    own = next((x for _, x in before if stock_attention.registered_by_user(x)), None)
    if own is not None:
        raise UnsupportedError(
            f"{type(model).__name__} attends with {own!r}, a function registered outside transformers, and "
            "calibration observes queries through its own function: calibrate with "
            'attn_implementation="sdpa" or "eager", and pass the file as calibration'
        )

    def attention(*call: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return observe(slimkv_attention(*call, **kwargs)[0], *call, **kwargs), None

    compat.AttentionInterface.register(OBSERVED, attention)
    compat.AttentionMaskInterface.register(OBSERVED, slimkv_mask)
    for config, _ in before:
        config._attn_implementation_internal = OBSERVED
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
