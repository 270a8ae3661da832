"""Settings whose fields carry their help and their limits: ``slimkv.cli.parsing`` makes options of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any

from slimkv.errors import InputError


def setting(
    default: Any = MISSING, help: str = "", *, least: int | None = None, positive: bool = False,
    known: Sequence[str] = (), option: str = "",
) -> Any:  # fmt: skip
    """A field of a settings dataclass.

    ``help``: the help of its option; a field without it has none. ``option``: its name on the command line, if it
    differs. ``least``, ``positive`` and ``known`` limit its value, or each value of a tuple.
    """
    limits = {"least": least, "positive": positive, "known": tuple(known)}
    return field(default=default, metadata={"help": help, "option": option, **limits})


def check_limits(settings: Any) -> None:
    """Raises if a value is beyond the limits of its field. None is not checked: it stands for no value."""
    for one in fields(settings):
        given, limits = getattr(settings, one.name), one.metadata
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            if limits.get("least") is not None and value < limits["least"]:
                raise InputError(f"{one.name} must be at least {limits['least']}, not {value}")
            if limits.get("positive") and not 0 < value < math.inf:
                raise InputError(f"{one.name} must be a positive number, not {value}")
            if limits.get("known") and value not in limits["known"]:
                name = one.name.removesuffix("s") if isinstance(given, tuple) else one.name
                raise InputError(f"unknown {name} {value!r}; known are {', '.join(limits['known'])}")
