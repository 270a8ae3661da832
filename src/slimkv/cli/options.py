"""Options that several commands share, and how lists are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer

from slimkv.errors import SlimKVError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

T = TypeVar("T")


def comma_list(text: str, convert: Callable[[str], T]) -> list[T]:
    """``a,b,c`` -> converted parts; empty ones are dropped."""
    return [convert(part.strip()) for part in text.split(",") if part.strip()]


def widths(text: str) -> list[int]:
    """``4``, ``2,3,4`` or ``1-8`` -> widths."""
    out: list[int] = []
    for part in comma_list(text, str):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise typer.BadParameter(f"cannot read the widths {text!r}; write 4, 2,3,4 or 1-8")
        out.extend(range(int(low), int(high or low) + 1))
    return out


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns slimkv's own errors into one line on standard error and exit code 2."""
    try:
        yield
    except SlimKVError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
