"""Settings whose fields carry their help and their limits: ``slimkv.cli.options`` makes options of them."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any

from slimkv.errors import InputError


def setting(default: Any, told: str = "", *, least: int | None = None, positive: bool = False) -> Any:
    """A field of a settings dataclass. ``told``: the help of its option; a field without it has none."""
    return field(default=default, metadata={"help": told, "least": least, "positive": positive})


def check_limits(settings: Any) -> None:
    """Raises if a number is below its limit."""
    for one in fields(settings):
        value, least = getattr(settings, one.name), one.metadata.get("least")
        if least is not None and value < least:
            raise InputError(f"{one.name} must be at least {least}, not {value}")
        if one.metadata.get("positive") and not 0 < value < math.inf:
            raise InputError(f"{one.name} must be a positive number, not {value}")
