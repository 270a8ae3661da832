"""How commands print: one JSON document with ``--json``, rich renderables without."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 200  # maximum width without a terminal and without COLUMNS


def console(stderr: bool = False) -> Console:
    """A console on standard output or error, as wide as the terminal; in a pipe tables are not squeezed."""
    out = Console(stderr=stderr, markup=False, emoji=False)  # text of users is printed literally, in tables too
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _WIDTH
    return out


def make_table(title: str, *columns: str, left: int = 1, rows: Iterable[Iterable[str]] = ()) -> Table:
    """A table whose first ``left`` columns are text and whose others are numbers."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="left" if number < left else "right", no_wrap=number == 0, overflow="fold"
        )  # "fold": no digit is cut off
    for row in rows:
        table.add_row(*row)
    return table


def to_json(result: Any) -> str:
    """A dataclass, dict or list as indented JSON."""
    data = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
    return json.dumps(data, indent=2, allow_nan=False)


def emit(result: Any, as_json: bool, *shown: Any, output: Path | None = None) -> None:
    """Prints ``result`` as JSON, or the renderables in ``shown``; writes the JSON to ``output`` as well."""
    out = console()
    for item in () if as_json else shown:
        out.print(item, highlight=not isinstance(item, str))
    if as_json:
        print(to_json(result))
    if output is not None:  # last: results are on the screen if the disk is full
        output.write_text(to_json(result) + "\n", encoding="utf-8")
