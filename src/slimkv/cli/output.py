"""How commands print: one JSON document with ``--json``, rich renderables without."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console on standard output or error; 110 columns wide where that is no terminal."""
    out = Console(stderr=stderr)
    return out if out.is_terminal else Console(stderr=stderr, width=110)


def to_json(result: Any) -> str:
    """A dataclass, dict or list as indented JSON."""
    data = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
    return json.dumps(data, indent=2, allow_nan=False)


def emit(result: Any, as_json: bool, *shown: Any) -> None:
    """Prints ``result`` as JSON, or the renderables in ``shown``."""
    if as_json:
        print(to_json(result))
        return
    out = console()
    for item in shown:
        out.print(item)
