"""``enable(model, "k4v4")``: ``model.generate`` and pipelines use a packed cache; ``status(model)`` reports on it."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.transformers.cache import SlimKVCache
from slimkv.integrations.transformers.calibration.matrix_index import note_positions
from slimkv.integrations.transformers.size import CacheSize
from slimkv.integrations.transformers.switching import Counts, counting, switch_off, switch_on, warn_if_decoded

STOCK = "stock"  # the format name of unpacked layers
PREPARE = "prepare_inputs_for_generation"
_REPLACED = ("generate", "generate_batch", PREPARE)

_lock = threading.Lock()


@dataclass
class Enabled:
    """The settings of ``enable``, and the state that ``disable`` restores."""

    format: str | KVCacheConfig
    options: dict[str, Any]
    configs: list[Any]  # the configs with switched attention
    switched: Any  # the finalizer that restores the attention, also when the model is deleted
    noting: Any  # the handle of ``note_positions``
    status: Status


class _Placed(partial[Any]):
    """A method that ``enable`` sets on a model object. Holding it in ``Enabled`` would keep the model alive."""

    own: Any = None  # the instance attribute that it replaced; None: the attribute was the class's


_enabled: WeakKeyDictionary[torch.nn.Module, Enabled] = WeakKeyDictionary()


@dataclass(frozen=True)
class Status:
    """How a model stores its keys and values and attends to them; printable."""

    enabled: bool  # whether ``generate`` uses a packed cache
    formats: dict[str, int] = field(default_factory=dict)  # layers by format
    calibration: str | None = None  # the tokens of the calibration; None: no calibration
    fused: bool = False  # attention reads packed codes; otherwise the model's own attention gets decoded tensors
    calls: Counts | None = None  # how attention ran in the last ``generate``, per layer call
    size: CacheSize | None = None  # the cache size after the last ``generate``

    @property
    def packed_layers(self) -> int:
        """The packed layers."""
        return sum(count for name, count in self.formats.items() if name != STOCK)

    def __str__(self) -> str:
        if not self.enabled:
            return "slimkv is off: generate uses the stock cache"
        formats = ", ".join(f"{count} {name}" for name, count in self.formats.items())
        lines = [
            f"slimkv is on: {self.packed_layers} of {sum(self.formats.values())} layers are packed ({formats})",
            f"calibration: {self.calibration or 'none'}",
            f"attention: {'reads packed codes' if self.fused else 'gets decoded keys and values'}",
        ]
        if self.calls is not None:
            lines.append(
                f"last generate: {self.size}; attention calls: {self.calls.fused} on packed codes, "
                f"{self.calls.decoded} decoded, {self.calls.plain} on keys and values not yet packed"
            )
        return "\n".join(lines)


def enable(model: Any, format: str | KVCacheConfig = AUTO, *, fused: bool = True, **options: Any) -> Any:
    """Makes ``model.generate`` (and pipelines, which call it) use a packed cache; returns the model.

    Every call of ``generate`` without ``past_key_values`` gets a fresh ``SlimKVCache(model, format, **options)``.
    Calling ``enable`` again changes the settings; ``disable`` ends it. Plain forward calls do not change; pass them a
    cache.

    Args:
        format: a format or a whole ``KVCacheConfig``, as for ``SlimKVCache``.
        fused: attention reads packed pages directly, as inside ``slimkv.attention(model)``; otherwise the model's own
            attention gets decoded keys and values.
        options: the other arguments of ``SlimKVCache``.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generate"):
        raise InputError(f"slimkv.enable takes a model that generates, not {type(model).__name__}")
    given, model = model, _uncompiled(model)
    takes = inspect.signature(model.generate).parameters.values()
    if not any(x.name == "past_key_values" or x.kind == x.VAR_KEYWORD for x in takes):
        raise InputError(
            f"model.generate of this {type(model).__name__} takes no past_key_values, so it cannot use a packed cache: "
            "let it pass **kwargs on to the generate of the model's class, or delete it (del model.generate)"
        )
    cache = SlimKVCache(model, format, **options)  # raises now rather than in the first generate
    formats = Counter(getattr(layer, "format", STOCK) for layer in cache.layers)
    calibration = next((x.settings.calibration for x in cache.packed_layers), None)
    disable(model)
    with _lock:
        configs = switch_on(model) if fused else []
        report = Status(True, dict(formats), calibration.source if calibration else None, bool(configs))
        restore = finalize(model, switch_off, configs)
        _enabled[model] = Enabled(format, options, configs, restore, note_positions(model), report)
        placed: dict[str, Any] = {"generate": _Placed(_generate, model, model.generate)}
        placed["generate_batch"] = _Placed(_refuse, model, "generate_batch")
        if (prepare := getattr(model, PREPARE, None)) is not None:
            placed[PREPARE] = _Placed(_prepare_inputs, model, prepare)
            placed[PREPARE].__signature__ = inspect.signature(prepare)  # ``generate`` reads it
        for name, value in placed.items():
            value.own, vars(model)[name] = vars(model).get(name), value
    if fused:
        warn_if_decoded(model, configs, stacklevel=2)
    return given


def disable(model: Any) -> Any:
    """Undoes ``enable``, if it was called; returns the model."""
    given, model = model, _uncompiled(model)
    with _lock:
        record = _enabled.pop(model, None) if isinstance(model, torch.nn.Module) else None
        if record is not None:
            record.switched()
            record.noting.remove()
            for name in _REPLACED:
                if isinstance(vars(model).get(name), _Placed):  # else another wrapper has replaced it
                    placed = vars(model).pop(name)
                    vars(model).update({name: placed.own} if placed.own is not None else {})
    return given


def _uncompiled(model: Any) -> Any:
    """The module inside the wrapper of ``torch.compile``, which delegates ``generate`` to it."""
    return getattr(model, "_orig_mod", model)


def status(model: Any) -> Status:
    """The settings of ``slimkv.enable`` for ``model``, and the counts and cache size of the last ``generate``."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"slimkv.status takes a model, not {type(model).__name__}")
    record = _enabled.get(_uncompiled(model))
    return Status(enabled=False) if record is None else record.status


def _generate(model: Any, generate: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of the model or its class, with a packed cache unless the call passes or forbids one."""
    record = _enabled.get(model)
    if record is None:  # a copy of an enabled model, or a disabled one
        return generate(*args, **kwargs)
    given = _given(generate, args, kwargs)
    kind = _asked("cache_implementation", model, given)
    if kind not in (None, "hybrid"):  # old checkpoints of sliding-window models call their default "hybrid"
        raise UnsupportedError(
            f"cache_implementation={kind!r} is not the packed cache that slimkv.enable set up: leave "
            "it out, or call slimkv.disable(model)"
        )
    cache = next((given[x] for x in ("past_key_values", "cache_params") if given.get(x) is not None), None)
    if cache is not None:
        if not isinstance(cache, SlimKVCache):
            warnings.warn(
                f"this call of generate passes a {type(cache).__name__}, which is not packed: leave past_key_values "
                "out, or pass a SlimKVCache",
                stacklevel=2,
            )
    elif _asked("use_cache", model, given) is not False:
        kwargs["past_key_values"] = cache = SlimKVCache(model, record.format, **record.options)
        if _asked("is_assistant", model, given):  # rejected draft tokens are removed, also from sliding windows
            cache.activate_past_recording()
    with counting(record.configs) as counts:
        out = generate(*args, **kwargs)
    if isinstance(cache, SlimKVCache):
        if cache.packed_layers and not any(layer.tokens for layer in cache.packed_layers):
            warnings.warn(
                f"{type(model).__name__} stored nothing in the packed cache: its generate used another cache",
                stacklevel=2,
            )
        record.status = replace(record.status, calls=counts, size=cache.size())
    return out


def _prepare_inputs(model: Any, prepare: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The inputs of a step of ``generate``, always with the packed cache.

    Phi-3 drops its cache where its rope switches to long factors, recomputes all tokens and creates a stock cache; the
    packed cache is reset and refilled instead.
    """
    inputs = prepare(*args, **kwargs)
    cache = kwargs.get("past_key_values")
    if model in _enabled and isinstance(cache, SlimKVCache) and inputs.get("past_key_values") is None:
        cache.reset()
        inputs["past_key_values"] = cache
    return inputs


def _given(generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``generate`` by name, including positional ones."""
    positional = [x.name for x in inspect.signature(generate).parameters.values() if x.kind == x.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def _asked(name: str, model: Any, given: dict[str, Any]) -> Any:
    """A setting of ``generate``: from the call's arguments, else its ``generation_config``, else the model's."""
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    values = (given.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _refuse(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if model not in _enabled:  # a copy of an enabled model
        return getattr(type(model), name)(model, *args, **kwargs)
    raise UnsupportedError(
        f"{name} (continuous batching) has its own paged cache, which slimkv does not pack: "
        "use generate, or call slimkv.disable(model)"
    )
