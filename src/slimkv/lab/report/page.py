"""Reports as self-contained HTML pages in the reader's light or dark theme, and tables in Markdown documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

Plot = tuple[str, str, str]  # title, caption, SVG

_COLOURS = ("#1f6feb", "#e8590c", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#b08900", "#5c677d")


def style() -> str:
    """The style sheet of a report."""
    rules = [
        f"svg .line.c{i} {{ stroke: {c}; }} svg circle.c{i}, svg text.name.c{i} {{ fill: {c}; }}"
        for i, c in enumerate(_COLOURS)
    ]
    sheet = resources.files("slimkv.lab.report").joinpath("style.css").read_text(encoding="utf-8")
    return sheet + "\n".join(rules)


def tile(big: str, small: str) -> str:
    """A card with one figure and its meaning."""
    return f'<div class="card"><div class="big">{escape(big)}</div><div class="sub">{escape(small)}</div></div>'


def td(value: Any, fmt: str = "{}") -> str:
    """A cell of a table; empty for None."""
    return f"<td>{'' if value is None else escape(fmt.format(value))}</td>"


def tr(cells: Iterable[str], style: str = "") -> str:
    """A row of a table from its cells, which are HTML."""
    kind = f' class="{style}"' if style else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def table(head: Sequence[str], rows: Iterable[str], name: str, style: str = "", note: str = "") -> str:
    """A table in a card, from rows made by ``tr``; ``note`` is text below it."""
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    kind = f' class="{style}"' if style else ""
    below = f'<p class="sub small">{escape(note)}</p>' if note else ""
    return (
        f'<div class="card scroll"><table id="{name}"{kind}><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{below}</div>"
    )


def plot_cards(plots: Sequence[Plot]) -> str:
    """Charts side by side, each in a card."""
    cards = "".join(
        f'<div class="card"><h3>{escape(title)}</h3><p class="sub small">{escape(caption)}</p>{svg}</div>'
        for title, caption, svg in plots
    )
    return f'<div class="plots after">{cards}</div>'


def versions_line(versions: Mapping[str, str]) -> str:
    """``torch 2.9.0, transformers 5.17.0``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def document(title: str, body: str) -> str:
    """A complete page around ``body`` (HTML) without external resources."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style()}</style></head>
<body><main>
{body}
</main></body></html>
"""


def table_line(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
