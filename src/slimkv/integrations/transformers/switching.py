"""The models whose attention reads packed pages, their previous attention, and the number of calls per path."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from slimkv.arguments import describe
from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.matrix_index import note_positions
from slimkv.integrations.transformers.stock_attention import (
    registered_by_user,
    stock_implementation,
    switchable_configs,
)

NAME = "slimkv"


@dataclass
class Counts:
    """How attention ran inside one ``attention(model)``, counted in layer calls."""

    fused: int = 0  # on packed pages
    decoded: int = 0  # on decoded keys and values, because the mask, the layer or the module requires it
    plain: int = 0  # on tensors that were never packed (first prefill, raw layers)


@dataclass
class _Switch:
    """A config with switched attention."""

    config: Any
    before: str  # its previous implementation
    stock: str  # ``eager`` or ``sdpa``: used if attention cannot read pages
    uses: int = 0


@dataclass
class _Context:
    """One ``attention(model)``."""

    configs: frozenset[int]
    thread: int
    counts: Counts = field(default_factory=Counts)


_lock = threading.RLock()
_switches: dict[int, _Switch] = {}  # by id of the config, which the switch keeps alive
_contexts: list[_Context] = []


def stock_of(config: Any) -> str | None:
    """``eager`` or ``sdpa`` for a switched config; None for any other."""
    switch = _switches.get(id(config))
    return switch.stock if switch is not None else None


def count(kind: str, config: Any = None) -> None:
    """Counts one call in the contexts that this thread opened for its model, or in all contexts of the model if the
    thread opened none (a worker thread).
    """
    if not _contexts:
        return
    with _lock:
        found = [x for x in _contexts if config is None or id(config) in x.configs]
        own = [x for x in found if x.thread == threading.get_ident()]
        for context in own or found:
            setattr(context.counts, kind, getattr(context.counts, kind) + 1)


def switch_on(model: Any) -> list[Any]:
    """Gives the text decoder of ``model`` the packed attention; returns the configs for ``switch_off``.

    May be nested and called by any thread: the last ``switch_off`` restores the previous attention. A config with a
    user-registered attention function keeps it.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(f"slimkv.attention takes a model of transformers, not {describe(model)}")
    with _lock:
        configs = [x for x in switchable_configs(model) if not registered_by_user(x._attn_implementation)]
        for config in configs:
            switch = _switches.get(id(config))
            if switch is None:
                before = config._attn_implementation
                switch = _switches[id(config)] = _Switch(config, before, stock_implementation(model, before))
                config._attn_implementation_internal = NAME
            switch.uses += 1
        return configs


def switch_off(configs: list[Any]) -> None:
    """Undoes one ``switch_on``."""
    with _lock:
        for config in configs:
            switch = _switches[id(config)]
            switch.uses -= 1
            if switch.uses == 0:
                if config._attn_implementation == NAME:  # else the user has chosen another one meanwhile
                    config._attn_implementation_internal = switch.before
                del _switches[id(config)]


def warn_if_decoded(model: Any, configs: list[Any], stacklevel: int) -> None:
    """Warns if ``switch_on`` found nothing to switch: attention then reads decoded keys and values."""
    if configs:
        return
    own = sorted({x._attn_implementation for x in switchable_configs(model)})
    if own:
        why = f"{type(model).__name__} attends with {own[0]!r}, a function registered outside transformers"
    else:
        why = f"the attention of {type(model).__name__} does not use transformers' attention interface"
    warnings.warn(
        f"{why}: attention runs unchanged on decoded keys and values; the cache is still packed",
        stacklevel=stacklevel + 1,
    )


def warn_if_off() -> None:
    """Warns of attention on decoded tensors, unless ``attention`` or ``enable`` is active: those warn themselves."""
    if not _switches and not _contexts:
        warnings.warn(
            "a packed cache is being attended through decoded keys and values: run the model inside "
            "slimkv.attention(model), or call slimkv.enable(model), so that attention reads the packed codes",
            stacklevel=2,
        )


@contextmanager
def counting(configs: list[Any]) -> Iterator[Counts]:
    """Counts how the attention of ``configs`` runs inside the context."""
    context = _Context(frozenset(map(id, configs)), threading.get_ident())
    with _lock:
        _contexts.append(context)
    try:
        yield context.counts
    finally:
        with _lock:
            _contexts[:] = [x for x in _contexts if x is not context]


@contextmanager
def attention(model: Any) -> Iterator[Counts]:
    """Inside the context, attention of ``model`` reads packed pages directly; yields counts of how it ran.

    Outside it, stock attention gets decoded tensors. Contexts may be nested, and threads may open them for one model at
    the same time; vision and audio towers keep their own attention.
    """
    configs, noting = switch_on(model), note_positions(model)
    warn_if_decoded(model, configs, stacklevel=3)
    try:
        with counting(configs) as counts:
            yield counts
    finally:
        noting.remove()
        switch_off(configs)
