"""Settings dataclasses whose fields have help texts and limits; ``slimkv.cli.parsing`` turns them into options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from slimkv.errors import InputError

MOST = 2**31 - 1  # the largest accepted number: some counters of torch and the engines have 32 bits


def setting(
    default: Any = MISSING, help: str = "", *, least: float | None = None, most: float = MOST, positive: bool = False,
    known: Sequence[str] = (), option: str = "",
) -> Any:  # fmt: skip
    """A field of a settings dataclass.

    ``help``: the help text of its option; a field without one has no option. ``option``: its name on the command line,
    if it differs. ``least``, ``most``, ``positive`` and ``known`` limit its value, or each value of a tuple.
    """
    limits = {"least": least, "most": most, "positive": positive, "known": tuple(known)}
    return field(default=default, metadata={"help": help, "option": option, **limits})


def option_name(one: Field[Any]) -> str:
    """The name of a field's option, such as ``--new-tokens``, or of the field if it has no option."""
    named = one.metadata.get("option") or one.name
    return "--" + named.replace("_", "-") if one.metadata.get("help") else named


def check_range(name: str, value: float, least: float, most: float = MOST) -> None:
    """Raises unless ``least <= value <= most``."""
    if not value >= least:
        raise InputError(f"{name} must be at least {least}, not {value}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, not {value}")


def check_limits(settings: Any) -> None:
    """Raises if a value is outside the limits of its field. None means no value and is not checked."""
    for one in fields(settings):
        given, limits = getattr(settings, one.name), one.metadata
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            if limits.get("positive") and not 0 < value < math.inf:
                raise InputError(f"{option_name(one)} must be a positive number, not {value}")
            if limits.get("positive") or limits.get("least") is not None:
                check_range(option_name(one), value, limits["least"] or 0, limits["most"])
            if limits.get("known") and value not in limits["known"]:
                name = one.name.removesuffix("s") if isinstance(given, tuple) else one.name
                raise InputError(f"unknown {name} {value!r}; known are {', '.join(limits['known'])}")
