"""Version numbers of other packages."""

from __future__ import annotations

import re


def version_numbers(version: str, count: int) -> tuple[int, ...]:
    """The first ``count`` numbers: ``0.32.0rc1`` -> (0, 32); missing ones are 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    return tuple((numbers + [0] * count)[:count])


def version_text(version: tuple[int, ...]) -> str:
    """(0, 5, 23) -> ``0.5.23``."""
    return ".".join(map(str, version))
