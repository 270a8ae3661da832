"""Small charts as inline SVG: no script, no fonts to load, colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, TOP, BOTTOM = 64, 18, 46
RIGHT = 96  # at least; the names of lines stand there
_LETTER = 7.5  # of a name


@dataclass(frozen=True)
class Series:
    """Points of one colour, joined by a line or labelled one by one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    title: str
    log: bool = False
    unit: str = ""


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
    """The label's place (left, baseline, right), moved down until it covers none of ``taken``."""
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

    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    out = [head, f"<title>{escape(title)}</title>"]

    def line(x1: float, x2: float, y1: float, y2: float) -> None:
        out.append(f'<line class="grid" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')

    def text(style: str, x: float, y: float, anchor: str, words: str) -> None:
        out.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    for tick in _ticks(*spans[1], y_axis.log):
        line(LEFT, WIDTH - right, py(tick), py(tick))
        text("tick", LEFT - 8, py(tick) + 4, "end", _number(tick) + y_axis.unit)
    for tick in _ticks(*spans[0], x_axis.log):
        line(px(tick), px(tick), TOP, HEIGHT - BOTTOM)
        text("tick", px(tick), HEIGHT - BOTTOM + 18, "middle", _number(tick) + x_axis.unit)
    text("axis", (LEFT + WIDTH - right) / 2, HEIGHT - 8, "middle", x_axis.title)
    turned = f"translate(15 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    out.append(f'<text class="axis" transform="{turned}" text-anchor="middle">{escape(y_axis.title)}</text>')
    last_label, taken = -math.inf, list[tuple[float, float, float]]()
    for number, one in sorted(enumerate(series), key=lambda item: py(item[1].y[-1])):
        colour = f"c{number % 8}"
        points = [(px(x), py(y)) for x, y in zip(one.x, one.y, strict=True)]
        if one.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline class="line {colour}" points="{path}"/>')
            last_label = max(points[-1][1] + 4, last_label + 14)  # names at the lines' ends must not overlap
            text(f"name {colour}", WIDTH - right + 8, last_label, "start", one.name)
        for (x, y), label in zip(points, one.labels or [""] * len(points), strict=True):
            circle = f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{3 if one.line else 5}">'
            out.append(f"{circle}<title>{escape(label or one.name)}</title></circle>")
            if label:
                taken.append(_free_spot(x + 9, y + 4, label, taken))
                text(f"name {colour}", taken[-1][0], taken[-1][1], "start", label)
    return "".join([*out, "</svg>"])
