"""Tables in Markdown, and documents whose results are written between two markers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slimkv.errors import InputError

END = "<!-- end -->"


def table_line(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"


def filled(text: str, start: str, body: str) -> str:
    """``text`` with ``body`` between the marker ``start`` and the next ``<!-- end -->``."""
    before, found, rest = text.partition(start)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise InputError(f"the document has no {start} ... {END} to fill")
    return f"{before}{start}\n{body}{END}{after}"


def rewrite(module: str, arguments: Sequence[str], fill: Callable[[str, Path], str]) -> int:
    """``python -m MODULE DOCUMENT FOLDER``: rewrites a document from a folder of results; returns the exit code."""
    if len(arguments) != 2:
        print(f"usage: python -m {module} DOCUMENT FOLDER", file=sys.stderr)
        return 2
    document = Path(arguments[0])
    document.write_text(fill(document.read_text(encoding="utf-8"), Path(arguments[1])), encoding="utf-8")
    return 0
