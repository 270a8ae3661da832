"""Charts of the suite's report beside those of ``evals.svg``: estimates with intervals, bars, and coloured grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slimkv.errors import InputError

_WIDTH, _ROW, _TOP, _BOTTOM = 560, 26, 10, 40
_LETTER = 7.3
STYLE = """
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
"""
_TONES = ("raw", "same", "worse", "better")


@dataclass(frozen=True)
class Estimate:
    """One line of ``intervals``."""

    name: str
    value: float
    low: float
    high: float
    tone: str  # raw, same, worse, better


@dataclass(frozen=True)
class Bar:
    """One line of ``bars``."""

    name: str
    value: float
    label: str
    quiet: bool = False  # what the others are compared with


def _open(title: str, rows: int, bottom: int) -> tuple[str, int]:
    height = _TOP + _ROW * rows + bottom
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}<title>{escape(title)}</title>", height


def _text(style: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _left(names: Sequence[str]) -> float:
    return 12 + _LETTER * max(len(name) for name in names)


def intervals(title: str, rows: Sequence[Estimate]) -> str:
    """Shares with their intervals, a line each; the interval of the one called ``raw`` is shaded across all."""
    if not rows:
        raise InputError("a chart of intervals needs rows")
    out, height = _open(title, len(rows), _BOTTOM)
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    low, high = max(0.0, low - 0.04), min(1.0, high + 0.04)
    left, right = _left([row.name for row in rows]), 64.0

    def px(value: float) -> float:
        return left + (value - low) / (high - low or 1.0) * (_WIDTH - right - left)

    parts, end = [out], height - _BOTTOM
    base = next((row for row in rows if row.tone == "raw"), None)
    if base is not None:
        wide = px(base.high) - px(base.low)
        parts.append(f'<rect class="band" x="{px(base.low):.1f}" y="{_TOP}" width="{wide:.1f}" height="{end - _TOP}"/>')
        parts.append(f'<line class="base" x1="{px(base.value):.1f}" x2="{px(base.value):.1f}" y1="{_TOP}" y2="{end}"/>')
    for share in (i / 10 for i in range(11)):
        if low <= share <= high:
            parts.append(f'<line class="grid" x1="{px(share):.1f}" x2="{px(share):.1f}" y1="{end}" y2="{end + 5}"/>')
            parts.append(_text("tick", px(share), end + 19, "middle", f"{share:.0%}"))
    parts.append(_text("axis", (left + _WIDTH - right) / 2, height - 4, "middle", title))
    for number, row in enumerate(rows):
        if row.tone not in _TONES:
            raise InputError(f"unknown tone {row.tone!r}; known are {', '.join(_TONES)}")
        y = _TOP + _ROW * (number + 0.5)
        parts.append(_text("row", left - 10, y + 4, "end", row.name))
        ends = f'x1="{px(row.low):.1f}" x2="{px(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line class="whisker {row.tone}" {ends}/>')
        told = f"{row.name}: {row.value:.1%} ({row.low:.1%} to {row.high:.1%})"
        circle = f'<circle class="{row.tone}" cx="{px(row.value):.1f}" cy="{y:.1f}" r="5">'
        parts.append(f"{circle}<title>{escape(told)}</title></circle>")
        parts.append(_text("figure", _WIDTH - 6, y + 4, "end", f"{row.value:.1%}"))
    return "".join([*parts, "</svg>"])


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Bars from 0, a line each."""
    if not rows or max(row.value for row in rows) <= 0:
        raise InputError("a chart of bars needs rows with a positive number")
    out, height = _open(title, len(rows), 24)
    left, right = _left([row.name for row in rows]), 14 + _LETTER * max(len(row.label) for row in rows)
    unit = (_WIDTH - left - right) / max(row.value for row in rows)
    parts = [out]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        parts.append(_text("row", left - 10, y + 17, "end", row.name))
        wide, style = max(row.value * unit, 1.0), "bar quiet" if row.quiet else "bar"
        parts.append(f'<rect class="{style}" x="{left:.1f}" y="{y + 4}" width="{wide:.1f}" height="18" rx="3"/>')
        parts.append(_text("figure", left + wide + 7, y + 17, "start", row.label))
    parts.append(_text("axis", (left + _WIDTH - right) / 2, height - 6, "middle", title))
    return "".join([*parts, "</svg>"])


def shaded(value: float | None, label: str, tip: str = "") -> str:
    """A cell of a grid, darker with its value between 0 and 1; empty where there is none."""
    if value is None:
        return "<td></td>"
    return f'<td class="shade" style="--v:{value:.3f}" title="{escape(tip)}">{escape(label)}</td>'
