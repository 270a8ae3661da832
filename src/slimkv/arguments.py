"""Checks the arguments of public functions against their annotations; an ``InputError`` names the wrong one.

``@typed`` reads a function's annotations once. It checks kinds (tensors, integers, names, ...); shapes, values and
devices are checked by the function itself.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from slimkv.errors import InputError, SlimKVError

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)
_NAMES: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None",
    torch.Tensor: "a tensor", torch.device: "a device", torch.dtype: "a dtype", Path: "a path", tuple: "a tuple",
    list: "a list", Mapping: "a mapping", Sequence: "a sequence",
}  # fmt: skip
# Further classes that an annotation accepts.
_ALSO: dict[Any, tuple[type, ...]] = {int: (np.integer,), float: (int, np.integer, np.floating), bool: (np.bool_,)}
_TEXTS = (str, bytes)


class _Rule:
    """The accepted kinds of one argument."""

    def __init__(self, name: str, kinds: tuple[Any, ...], error: type[SlimKVError]) -> None:
        self.name, self.error = name, error
        self.classes = tuple(c for kind in kinds for c in (kind, *_ALSO.get(kind, ())))
        self.takes_bool = bool in kinds
        self.is_device = torch.device in kinds
        self.is_sequence = Sequence in kinds and str not in kinds
        self.wanted = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)

    def check(self, value: Any) -> None:
        fits = isinstance(value, self.classes) and (self.takes_bool or type(value) is not bool)
        if not fits or (self.is_sequence and isinstance(value, _TEXTS)):
            raise self.error(f"{self.name} must be {self.wanted}, not {describe(value)}")
        if self.is_device and isinstance(value, str):
            self.check_device(value)

    def check_device(self, value: str) -> None:
        try:
            torch.device(value)
        except RuntimeError as error:
            raise self.error(
                f"{self.name} is {value!r}, which is not a device: {str(error).splitlines()[0]}"
            ) from error


def describe(value: Any) -> str:
    """``value`` as text for a message: tensors by dtype, shape and device, everything else by a truncated ``repr``."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    text = repr(value)
    return f"{text[:80]}... ({type(value).__name__})" if len(text) > 80 else f"{text} ({type(value).__name__})"


def _kinds(annotation: Any) -> tuple[Any, ...] | None:
    """The classes that an annotation accepts, or None if it cannot be checked."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_kinds(part) for part in typing.get_args(annotation)]
        return None if any(part is None for part in parts) else tuple(kind for part in parts for kind in part or ())
    if origin in (tuple, list, Mapping, Sequence):
        return (origin,)
    if annotation is None:
        return (type(None),)
    if isinstance(annotation, type) and annotation not in (object, Any) and origin is None:
        return (annotation,)
    return None


def _rules(annotations: dict[str, Any], scope: dict[str, Any], error: type[SlimKVError]) -> Iterator[_Rule]:
    for name, annotation in annotations.items():
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, scope)  # slimkv's own source, evaluated in its module
            except (NameError, TypeError):  # a name for type checkers only
                continue
        kinds = _kinds(annotation)
        if kinds is not None and name != "return":
            yield _Rule(name, kinds, error)


def typed(function: _F, error: type[SlimKVError] = InputError) -> _F:
    """Raises ``error`` for arguments of the wrong kind; arguments without a checkable annotation are not checked."""
    names = list(inspect.signature(function).parameters)

    @functools.cache
    def rules() -> dict[str, _Rule]:
        return {rule.name: rule for rule in _rules(function.__annotations__, function.__globals__, error)}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        known = rules()
        for name, value in chain(zip(names, args, strict=False), kwargs.items()):
            rule = known.get(name)
            if rule is not None:
                rule.check(value)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def typed_fields(error: type[SlimKVError] = InputError) -> Callable[[_C], _C]:
    """``typed`` for a dataclass, above ``@dataclass``: checks fields before ``__post_init__`` uses their values."""

    def decorate(cls: _C) -> _C:
        cls.__init__ = typed(cls.__init__, error)  # type: ignore[misc]
        return cls

    return decorate
