"""The HTML of reports: one self-contained page that follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from slimkv.lab.report.charts import WIDTH

Plot = tuple[str, str, str]  # title, caption, SVG

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6879; --line: #dfe4ec; --card: #ffffff; --page: #f4f6fa;
  --accent: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa5b8; --line: #303848; --card: #1a202c;
  --page: #11151d; --accent: #6ea8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
.sub, footer { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 26px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; }
.big { font-size: 28px; font-weight: 650; letter-spacing: -0.02em; color: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 14px; }
.pair h3, .plots h3 { margin: 0 0 8px; font-size: 15px; }
.pair p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.scroll { overflow-x: auto; }
.small { font-size: 14px; }
.pair .small { margin-top: 10px; }
.plots .small { margin: 0 0 8px; }
.after { margin-top: 14px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
th { color: var(--soft); font-weight: 500; font-size: 14px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2.2; }
svg .name { font-weight: 600; stroke: none; }
footer { margin-top: 40px; font-size: 14px; overflow-wrap: anywhere; }
svg .row { fill: var(--ink); font-weight: 600; }
svg .figure { fill: var(--ink); }
svg .band { fill: var(--accent); opacity: 0.10; }
svg .base { stroke: var(--accent); stroke-dasharray: 4 3; stroke-width: 1.4; }
svg .whisker { stroke-width: 2; }
svg .same { stroke: var(--soft); fill: var(--soft); } svg .raw { stroke: var(--accent); fill: var(--accent); }
svg .worse { stroke: #d9480f; fill: #d9480f; } svg .better { stroke: #2b8a3e; fill: #2b8a3e; }
svg .bar { fill: var(--accent); opacity: 0.85; } svg .bar.quiet { fill: var(--soft); opacity: 0.55; }
.grid-table td { text-align: center; } .grid-table td:first-child { text-align: left; }
.grid-table th { text-align: center; } .grid-table th:first-child { text-align: left; }
.grid-table .shade { background: color-mix(in srgb, var(--accent) calc(var(--v) * 55%), transparent); }
.same-bytes td { border-top: 2px solid var(--soft); }
.tag { font-size: 13px; padding: 1px 7px; border-radius: 9px; border: 1px solid var(--line); white-space: nowrap; }
.tag.worse { color: #d9480f; border-color: #d9480f; } .tag.better { color: #2b8a3e; border-color: #2b8a3e; }
#costs th, #costs td { padding: 7px 8px; font-size: 14.5px; }
.failed { border-color: #d9480f; }
ul.words { margin: 0; padding-left: 20px; }
@media (max-width: 520px) { main { padding: 24px 14px 40px; } .card { padding: 14px; } }
"""
_COLOURS = ("#1f6feb", "#e8590c", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#b08900", "#5c677d")


def style() -> str:
    """The style sheet of a report."""
    rules = [
        f"svg .line.c{i} {{ stroke: {c}; }} svg circle.c{i}, svg text.name.c{i} {{ fill: {c}; }}"
        for i, c in enumerate(_COLOURS)
    ]
    return _STYLE + "\n".join(rules)


def tile(big: str, small: str) -> str:
    """A card with one figure and its meaning."""
    return f'<div class="card"><div class="big">{escape(big)}</div><div class="sub">{escape(small)}</div></div>'


def td(value: Any, shape: str = "{}") -> str:
    """A cell of a table; empty for None."""
    return f"<td>{'' if value is None else escape(shape.format(value))}</td>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str, style: str = "", note: str = "") -> str:
    """A table in a card; the cells of ``rows`` are HTML, ``note`` is text below it."""
    return table_of_lines(head, [f"<tr>{''.join(cells)}</tr>" for cells in rows], name, style, note)


def table_of_lines(head: Sequence[str], lines: Sequence[str], name: str, style: str = "", note: str = "") -> str:
    """The same from whole ``<tr>`` elements."""
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    kind = f' class="{style}"' if style else ""
    below = f'<p class="sub small">{escape(note)}</p>' if note else ""
    return (
        f'<div class="card scroll"><table id="{name}"{kind}><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>{below}</div>"
    )


def plot_cards(plots: Sequence[Plot]) -> str:
    """Charts side by side, each in a card."""
    cards = "".join(
        f'<div class="card"><h3>{escape(title)}</h3><p class="sub small">{escape(told)}</p>{svg}</div>'
        for title, told, svg in plots
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


def stacked(title: str, drawings: Sequence[str]) -> str:
    """Charts one below the other, as an SVG file of its own."""
    parts, top = [], 0
    for drawing in drawings:
        tall = int(drawing.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
        inside = drawing.partition(">")[2].removesuffix("</svg>")
        parts.append(f'<g transform="translate(0 {top})">{inside}</g>')
        top += tall + 12
    frame = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame}><style>{style()}</style>{"".join(parts)}</svg>\n'
