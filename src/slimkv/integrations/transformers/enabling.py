"""``enable(model, "k4v4")``: from then on ``model.generate`` and pipelines keep their keys and values packed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.transformers.cache import SlimKVCache
from slimkv.integrations.transformers.calibration.matrix_index import note_positions
from slimkv.integrations.transformers.switching import switch_off, switch_on

_lock = threading.Lock()


@dataclass
class _Enabled:
    """What ``enable`` was asked for, and what ``disable`` puts back."""

    format: str | KVCacheConfig
    options: dict[str, Any]
    configs: list[Any]  # whose attention was switched
    noting: Any  # the handle of ``note_positions``


_enabled: WeakKeyDictionary[torch.nn.Module, _Enabled] = WeakKeyDictionary()


def enable(model: Any, format: str | KVCacheConfig = AUTO, *, fused: bool = True, **options: Any) -> Any:
    """Lets ``model.generate`` (and pipelines, which call it) use a packed cache; returns the model.

    Every call of ``generate`` without a cache of its own gets a fresh ``SlimKVCache(model, format, **options)``.
    Calling ``enable`` again changes the settings; ``disable`` ends it. Plain forward calls do not change: give them a
    cache.

    Args:
        format: a format or a whole ``KVCacheConfig``, as for ``SlimKVCache``.
        fused: attention reads packed pages directly, as inside ``slimkv.attention(model)``; otherwise the model's own
            attention gets decoded keys and values.
        options: the other arguments of ``SlimKVCache``.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generate"):
        raise InputError(f"slimkv.enable takes a model that generates, not {type(model).__name__}")
    SlimKVCache(model, format, **options)  # refuses now what it would refuse in the first generate
    disable(model)
    with _lock:
        _enabled[model] = _Enabled(format, options, switch_on(model) if fused else [], note_positions(model))
        vars(model).update(generate=partial(_generate, model), generate_batch=partial(_refuse, model, "generate_batch"))
    return model


def disable(model: Any) -> Any:
    """Takes ``enable`` back, also if there was none; returns the model."""
    with _lock:
        record = _enabled.pop(model, None) if isinstance(model, torch.nn.Module) else None
        if record is not None:
            switch_off(record.configs)
            record.noting.remove()
            for name in ("generate", "generate_batch"):
                vars(model).pop(name, None)
    return model


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of the model's class, with a packed cache unless the call brings or forbids one."""
    record = _enabled.get(model)
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    asked = {
        name: kwargs[name] if kwargs.get(name) is not None else getattr(config, name, None)
        for name in ("use_cache", "cache_implementation")
    }
    if asked["cache_implementation"] is not None:
        raise UnsupportedError(
            f"cache_implementation={asked['cache_implementation']!r} names another cache than the packed one that "
            "slimkv.enable set up: leave it out, or call slimkv.disable(model)"
        )
    given = any(kwargs.get(name) is not None for name in ("past_key_values", "cache_params"))
    if record is not None and not given and asked["use_cache"] is not False:
        kwargs["past_key_values"] = SlimKVCache(model, record.format, **record.options)
    return type(model).generate(model, *args, **kwargs)


def _refuse(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if model not in _enabled:  # a copy of an enabled model
        return getattr(type(model), name)(model, *args, **kwargs)
    raise UnsupportedError(
        f"{name} (continuous batching) keeps keys and values in a paged cache of its own, which slimkv does not pack: "
        "use generate, or call slimkv.disable(model)"
    )
