"""A model's own attention: which modules use the attention interface, and which function they would call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from slimkv.integrations.transformers.compat import ALL_ATTENTION_FUNCTIONS, AttentionInterface

EAGER, SDPA = "eager", "sdpa"


@lru_cache(maxsize=4096)
def _names(kind: Any) -> tuple[frozenset[str], dict[str, Any], frozenset[str]]:
    """Names and string constants in the code of ``kind.forward``, and the globals it sees."""
    function: Any = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    code = getattr(function, "__code__", None)
    if code is None:
        return frozenset(), {}, frozenset()
    strings: set[str] = set()
    constants = list(code.co_consts)
    while constants:
        constant = constants.pop()
        if isinstance(constant, str):
            strings.add(constant)
        elif isinstance(constant, tuple | frozenset):
            constants += constant
    return frozenset(code.co_names), function.__globals__, frozenset(strings)


def follows_interface(module: torch.nn.Module) -> bool:
    """Whether ``module`` looks up its attention in the attention interface, by the name in its config."""
    names, _, _ = _names(type(module))  # type: ignore[arg-type]
    return "_attn_implementation" in names and any(isinstance(x, AttentionInterface) for x in _values(type(module)))


def chooses_by_name(module: torch.nn.Module) -> bool:
    """Whether ``module`` behaves differently if its attention is not named ``sdpa`` (masks, sparse indices)."""
    names, _, strings = _names(type(module))  # type: ignore[arg-type]
    return "_attn_implementation" in names and SDPA in strings


def _values(kind: Any) -> Iterator[Any]:
    names, scope, _ = _names(kind)
    return (scope[name] for name in names if name in scope)


@lru_cache(maxsize=4096)
def stock_function(kind: Any, implementation: str) -> Callable[..., Any] | None:
    """The function that modules of ``kind`` call under the name ``implementation``; None if unknown."""
    interface = next((x for x in _values(kind) if isinstance(x, AttentionInterface)), ALL_ATTENTION_FUNCTIONS)
    if implementation != EAGER:
        return interface.get(implementation, None)
    names, scope, _ = _names(kind)
    found = [scope[name] for name in sorted(names) if "eager" in name and callable(scope.get(name))]
    return found[0] if len(found) == 1 else None


def stock_implementation(model: Any, name: str | None) -> str:
    """``eager`` or ``sdpa``, whichever replaces ``name`` in ``model`` on decoded tensors. Flash and flex attention take
    other kinds of masks, so a model that uses them falls back to torch's attention if keys and values must be decoded.
    """
    if name in (EAGER, SDPA):
        return str(name)
    return SDPA if getattr(model, "_supports_sdpa", False) else EAGER


def layer_number(module: Any) -> int:
    """The number of the cache layer that a module reads: its own, or that of an earlier layer if they share one."""
    if getattr(module, "is_kv_shared_layer", False):
        return int(module.kv_shared_layer_index)
    return int(module.layer_idx)


def registered_by_user(name: str | None) -> bool:
    """Whether ``name`` is an attention function from outside transformers and slimkv (``AttentionInterface.register``).

    Its computation is unknown, so it is never replaced.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(name, None) if name is not None else None
    while isinstance(function, partial):
        function = function.func
    package = (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return function is not None and package not in ("transformers", "slimkv")


def switchable_configs(model: Any) -> list[Any]:
    """The configs of the text decoder's attention modules whose attention name can be changed safely. A config that is
    shared with a module that compares the name with ``sdpa`` is left out.
    """
    text = type(model.config.get_text_config(decoder=True)) if hasattr(model.config, "get_text_config") else None
    found: dict[int, Any] = {}
    part = model.get_decoder() if hasattr(model, "get_decoder") else None  # without vision, audio and the encoder
    decoder = part if isinstance(part, torch.nn.Module) else model
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if config is None or not hasattr(config, "_attn_implementation") or not follows_interface(module):
            continue
        if decoder is not model or text is None or isinstance(config, text):
            found[id(config)] = config
    for module in model.modules():
        if chooses_by_name(module):
            found.pop(id(getattr(module, "config", None)), None)
    return list(found.values())
