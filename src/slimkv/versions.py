"""Version numbers of other packages, and whether they have the parts that slimkv needs."""

from __future__ import annotations

import re
from typing import Any


def version_numbers(version: str, count: int) -> tuple[int, ...]:
    """The first ``count`` numbers: ``0.32.0rc1`` -> (0, 32); zeros where the text has none."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    return tuple((numbers + [0] * count)[:count])


def version_text(version: tuple[int, ...]) -> str:
    """(0, 5, 23) -> ``0.5.23``."""
    return ".".join(map(str, version))


def require_parts(owner: Any, *names: str) -> None:
    """Raises ``ImportError`` unless ``owner`` has all of ``names``, as a failed import would."""
    for name in names:
        if not hasattr(owner, name):
            raise ImportError(f"{owner.__name__}.{name}")
