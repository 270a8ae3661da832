"""Plots that several reports share, from plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from slimkv.lab.report.charts import WIDTH, Axis, Series, chart
from slimkv.lab.report.page import Plot, style

_LEAST_KL = 1e-7  # a logarithmic axis has no 0
_GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("calibrated", lambda name: name.endswith("+cal")),
    ("turboquant", lambda name: name.startswith("turboquant")),
    ("fp8", lambda name: name == "fp8"),
    ("plain", lambda name: True),
)


def quality_plot(points: Sequence[tuple[str, float, float]]) -> Plot:
    """KL divergence against bytes per token; a point is (format, bytes per token, KL)."""
    series, left = [], list(points)
    for name, belongs in _GROUPS:
        own = [point for point in left if belongs(point[0])]
        left = [point for point in left if not belongs(point[0])]
        if own:
            names, size, kl = zip(*own, strict=True)
            series.append(Series(name, size, [max(x, _LEAST_KL) for x in kl], names, line=False))
    title = "Quality at equal bytes"
    svg = chart(title, Axis("cache bytes per token"), Axis("KL divergence, nats", log=True), series)
    return title, "Lower is closer to the unquantized cache; further left is smaller.", svg


def position_plots(edges: Sequence[int], rows: Sequence[tuple[str, Sequence[float], Sequence[int]]]) -> list[Plot]:
    """Plots by position, in ranges that end at ``edges``; a row is (format, KL of each range, bytes at its end)."""
    middles = [(a + b) / 2 for a, b in zip((0, *edges[:-1]), edges, strict=True)]
    kl = [Series(name, middles, [max(x, _LEAST_KL) for x in values]) for name, values, _ in rows]
    svg = chart("KL divergence by position", Axis("position"), Axis("KL divergence from raw, nats", log=True), kl)
    plots = [("Over a long text", "KL divergence from the stock cache as the context grows.", svg)]
    if all(sizes for _, _, sizes in rows):
        held = [Series(name, edges, [size / 2**20 for size in sizes]) for name, _, sizes in rows]
        svg = chart("Bytes by position", Axis("position"), Axis("bytes of the cache, MiB"), held)
        plots.append(("Bytes by position", "A memory budget stores old tokens in fewer bits.", svg))
    return plots


def write_plots(title: str, drawings: Sequence[str], path: Path) -> None:
    """Writes charts one below the other to an SVG file."""
    parts, top = [], 0
    for drawing in drawings:
        height = int(drawing.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
        inside = drawing.partition(">")[2].removesuffix("</svg>")
        parts.append(f'<g transform="translate(0 {top})">{inside}</g>')
        top += height + 12
    frame = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" role="img" aria-label="{escape(title)}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {frame}><style>{style()}</style>{"".join(parts)}</svg>\n'
    path.write_text(svg, encoding="utf-8")
