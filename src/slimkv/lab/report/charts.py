"""Charts as inline SVG, without scripts or fonts; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slimkv.errors import InputError

WIDTH, HEIGHT = 560, 340
LEFT, TOP, BOTTOM = 64, 18, 46
RIGHT = 96  # minimum of the right margin, which holds the names of lines
_LETTER = 8.6  # width of a letter, in the widest of the usual bold fonts
_ROW, _ROW_TOP, _ROW_BOTTOM = 26, 10, 40  # row height and margins of charts with one row per name


@dataclass(frozen=True)
class Series:
    """Points of one colour, joined by a line or labelled individually."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """The settings of an axis."""

    title: str
    log: bool = False
    unit: str = ""


def _element(kind: str, style: str, inside: str = "", **numbers: float) -> str:
    """An SVG element with a CSS class and numeric attributes; ``inside``: its title."""
    places = " ".join(f'{name}="{value:.1f}"' for name, value in numbers.items())
    return f'<{kind} class="{style}" {places}>{f"<title>{escape(inside)}</title>" if inside else ""}</{kind}>'


def _text(style: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    frame = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "".join([frame, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        marks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        inside = [t for t in marks if low <= t <= high]
        return inside if len(inside) < 8 else [t for t in inside if f"{t:e}"[0] == "1"]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(x: float) -> str:
    return f"{x / 1000:g}k" if abs(x) >= 1000 else f"{x:.3g}"


def _free_spot(x: float, y: float, label: str, taken: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The position of a label (left, baseline, right), moved down until it overlaps none of ``taken``."""
    right = x + _LETTER * len(label)
    while any(abs(y - other) < 13 and x < end and start < right for start, other, end in taken):
        y += 13
    return x, y, right


def chart(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """An SVG chart; every series must have as many x as y, and logarithmic axes only positive numbers."""
    xs, ys = [v for s in series for v in s.x], [v for s in series for v in s.y]
    if not xs or len(xs) != len(ys):
        raise ValueError(f"a chart needs points with an x and a y each, not {len(xs)} and {len(ys)}")
    right = max([RIGHT, *(16 + _LETTER * len(s.name) for s in series if s.line)])
    spans = []
    for values, axis in ((xs, x_axis), (ys, y_axis)):
        low, high = min(values), max(values)
        if axis.log:
            spans.append((low / 1.25, high * 1.25))
        else:
            pad = 0.06 * (high - low or abs(high) or 1.0)
            spans.append((low if low == 0 else low - pad, high + pad))

    def place(value: float, axis: Axis, span: tuple[float, float], start: float, end: float) -> float:
        low, high = (math.log10(v) for v in span) if axis.log else span
        at = math.log10(value) if axis.log else value
        return start + (at - low) / (high - low) * (end - start)

    def px(value: float) -> float:
        return place(value, x_axis, spans[0], LEFT, WIDTH - right)

    def py(value: float) -> float:
        return place(value, y_axis, spans[1], HEIGHT - BOTTOM, TOP)

    bottom, out = HEIGHT - BOTTOM, list[str]()
    for tick in _ticks(*spans[1], y_axis.log):
        out.append(_element("line", "grid", x1=LEFT, x2=WIDTH - right, y1=py(tick), y2=py(tick)))
        out.append(_text("tick", LEFT - 8, py(tick) + 4, "end", _number(tick) + y_axis.unit))
    for tick in _ticks(*spans[0], x_axis.log):
        out.append(_element("line", "grid", x1=px(tick), x2=px(tick), y1=TOP, y2=bottom))
        out.append(_text("tick", px(tick), bottom + 18, "middle", _number(tick) + x_axis.unit))
    out.append(_text("axis", (LEFT + WIDTH - right) / 2, HEIGHT - 8, "middle", x_axis.title))
    turned = f"translate(15 {(TOP + bottom) / 2}) rotate(-90)"
    out.append(f'<text class="axis" transform="{turned}" text-anchor="middle">{escape(y_axis.title)}</text>')
    last_label, taken = -math.inf, list[tuple[float, float, float]]()
    for number, one in sorted(enumerate(series), key=lambda item: py(item[1].y[-1])):
        colour = f"c{number % 8}"
        points = [(px(x), py(y)) for x, y in zip(one.x, one.y, strict=True)]
        if one.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline class="line {colour}" points="{path}"/>')
            last_label = max(points[-1][1] + 4, last_label + 14)  # names at the lines' ends must not overlap
            out.append(_text(f"name {colour}", WIDTH - right + 8, last_label, "start", one.name))
        for (x, y), label in zip(points, one.labels or [""] * len(points), strict=True):
            out.append(_element("circle", colour, label or one.name, cx=x, cy=y, r=3 if one.line else 5))
            if label:
                taken.append(_free_spot(x + 9, y + 4, label, taken))
                out.append(_text(f"name {colour}", taken[-1][0], taken[-1][1], "start", label))
    return _svg(title, HEIGHT, out)


@dataclass(frozen=True)
class Estimate:
    """One row of ``intervals``."""

    name: str
    value: float
    low: float
    high: float
    tone: str  # raw, same, worse, better


@dataclass(frozen=True)
class Bar:
    """One row of ``bars``."""

    name: str
    value: float
    label: str
    quiet: bool = False  # drawn in grey: the baseline


def _left(names: Sequence[str]) -> float:
    return 12 + _LETTER * max(len(name) for name in names)


def intervals(title: str, rows: Sequence[Estimate]) -> str:
    """Shares with their intervals, one per row; the interval of ``raw`` is shaded across all rows."""
    if not rows:
        raise InputError("a chart of intervals needs rows")
    height = _ROW_TOP + _ROW * len(rows) + _ROW_BOTTOM
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    low, high = max(0.0, low - 0.04), min(1.0, high + 0.04)
    left, right = _left([row.name for row in rows]), 64.0

    def px(value: float) -> float:
        return left + (value - low) / (high - low or 1.0) * (WIDTH - right - left)

    parts, end = list[str](), height - _ROW_BOTTOM
    base = next((row for row in rows if row.tone == "raw"), None)
    if base is not None:
        wide, middle = px(base.high) - px(base.low), px(base.value)
        parts.append(_element("rect", "band", x=px(base.low), y=_ROW_TOP, width=wide, height=end - _ROW_TOP))
        parts.append(_element("line", "base", x1=middle, x2=middle, y1=_ROW_TOP, y2=end))
    for share in (i / 10 for i in range(11)):
        if low <= share <= high:
            parts.append(_element("line", "grid", x1=px(share), x2=px(share), y1=end, y2=end + 5))
            parts.append(_text("tick", px(share), end + 19, "middle", f"{share:.0%}"))
    parts.append(_text("axis", (left + WIDTH - right) / 2, height - 4, "middle", title))
    for number, row in enumerate(rows):
        y, tip = _ROW_TOP + _ROW * (number + 0.5), f"{row.name}: {row.value:.1%} ({row.low:.1%} to {row.high:.1%})"
        parts.append(_text("row", left - 10, y + 4, "end", row.name))
        parts.append(_element("line", f"whisker {row.tone}", x1=px(row.low), x2=px(row.high), y1=y, y2=y))
        parts.append(_element("circle", row.tone, tip, cx=px(row.value), cy=y, r=5))
        parts.append(_text("figure", WIDTH - 6, y + 4, "end", f"{row.value:.1%}"))
    return _svg(title, height, parts)


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0, one per row."""
    if not rows or max(row.value for row in rows) <= 0:
        raise InputError("a chart of bars needs rows with a positive number")
    height = _ROW_TOP + _ROW * len(rows) + 24
    left, right = _left([row.name for row in rows]), 14 + _LETTER * max(len(row.label) for row in rows)
    unit = (WIDTH - left - right) / max(row.value for row in rows)
    parts = []
    for number, row in enumerate(rows):
        y, wide = _ROW_TOP + _ROW * number, max(row.value * unit, 1.0)
        parts.append(_text("row", left - 10, y + 17, "end", row.name))
        style = "bar quiet" if row.quiet else "bar"
        parts.append(_element("rect", style, x=left, y=y + 4, width=wide, height=18, rx=3))
        parts.append(_text("figure", left + wide + 7, y + 17, "start", row.label))
    parts.append(_text("axis", (left + WIDTH - right) / 2, height - 6, "middle", title))
    return _svg(title, height, parts)


def shaded(value: float | None, label: str, tip: str = "") -> str:
    """A cell of a grid, darker with its value between 0 and 1; empty where there is none."""
    if value is None:
        return "<td></td>"
    return f'<td class="shade" style="--v:{value:.3f}" title="{escape(tip)}">{escape(label)}</td>'
