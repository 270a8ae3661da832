"""Tables in Markdown, and documents whose results are written between two markers."""

from __future__ import annotations

from collections.abc import Sequence

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
