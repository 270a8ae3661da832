"""Plots as PNG files, with or without a display: one for each eval on a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimkv.errors import MissingDependencyError
from slimkv.lab.evals.agreement import AgreementRow
from slimkv.lab.evals.generation import GenerationReport
from slimkv.lab.evals.harness import WITH_CALIBRATION
from slimkv.lab.evals.needle import NeedleReport
from slimkv.lab.evals.perplexity import PerplexityRow
from slimkv.lab.evals.positions import PositionReport


@contextmanager
def figure(path: Path, columns: int = 1, width: float = 6.4, height: float = 4.2) -> Iterator[tuple[Any, Any]]:
    """Yields a matplotlib figure and its axes (an array if ``columns`` > 1); saves it to ``path`` afterwards."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'slimkv[eval]'") from error
    drawing = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(drawing)
    yield drawing, drawing.subplots(1, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def plot_quality(rows: Sequence[PerplexityRow | AgreementRow], path: Path) -> None:
    """Extra perplexity against bytes per token."""
    shown = [r for r in rows if r.format != "raw"]
    with figure(path) as (_, axes):
        axes.plot([r.bytes_per_token for r in shown], [100 * r.over_raw for r in shown], "o", color="tab:blue")
        for row in shown:
            axes.annotate(row.format, (row.bytes_per_token, 100 * row.over_raw), (5, 5), textcoords="offset points")
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_xlabel("cache bytes per token")
        axes.set_ylabel("perplexity over the stock cache, %")


def plot_needle(report: NeedleReport, path: Path) -> None:
    """A panel per format: depth against context, the share found as colour."""
    formats = list(dict.fromkeys(c.format for c in report.cells))
    contexts = sorted({c.context for c in report.cells})
    depths = sorted({c.depth for c in report.cells})
    share = {(c.format, c.context, c.depth): c.found / c.tried for c in report.cells}
    with figure(path, columns=len(formats), width=3.6) as (_, axes):
        for format, panel in zip(formats, [axes] if len(formats) == 1 else axes, strict=True):
            grid = [[share[format, context, depth] for context in contexts] for depth in depths]
            panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            panel.set_xticks(range(len(contexts)), [str(c) for c in contexts])
            panel.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
            panel.set_xlabel("context, tokens")
            panel.set_ylabel("depth")
            panel.set_title(f"{format}: {report.score(format):.0%} found")


def plot_generation(report: GenerationReport, path: Path) -> None:
    """Tokens until the text first differs, by format and prompt."""
    formats = list(dict.fromkeys(r.format for r in report.rows))
    with figure(path) as (_, axes):
        for number, format in enumerate(formats):
            same = [
                r.tokens if r.first_divergence is None else r.first_divergence
                for r in report.rows
                if r.format == format
            ]
            axes.scatter([number] * len(same), same, color="tab:blue", alpha=0.7)
        axes.set_xticks(range(len(formats)), formats)
        axes.set_ylim(0, report.new_tokens * 1.05)
        axes.set_ylabel("tokens before the first difference")


def plot_positions(report: PositionReport, path: Path) -> None:
    """KL divergence against position, and the bytes that the cache takes there: one line per format."""
    middles = [(a + b) / 2 for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    colours: dict[str, str] = {}
    with figure(path, columns=2) as (_, (axes, memory)):
        for row in report.rows:
            plain = row.format.removesuffix(WITH_CALIBRATION)
            colour = colours.setdefault(plain, f"C{len(colours)}")
            style = "o--" if row.format == plain else "o-"
            axes.plot(middles, row.kl, style, markersize=4, color=colour, label=row.format)
            memory.plot(report.edges, [x / 2**20 for x in row.bytes], style, markersize=4, color=colour)
        axes.set_yscale("log")
        axes.set_ylabel("KL divergence to the stock cache, nats")
        axes.legend()
        memory.set_ylabel("bytes of the cache, MiB")
        memory.set_ylim(0)
        for panel in (axes, memory):
            panel.set_xlabel("position")
