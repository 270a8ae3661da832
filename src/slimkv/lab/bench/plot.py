"""Plots of reports: time of each baseline over slimkv's, and the sessions phase."""

from __future__ import annotations

from pathlib import Path

from slimkv.errors import InputError
from slimkv.lab.bench.results import Report
from slimkv.lab.bench.serve import ServeReport
from slimkv.lab.bench.serve_settings import is_stock
from slimkv.lab.evals.plots import figure
from slimkv.lab.report.charts import Bar, bars
from slimkv.lab.report.page import stacked


def plot(report: Report, path: Path) -> None:
    """Bars per cell and backend, a colour per baseline; 1 is as fast as slimkv."""
    names = list(dict.fromkeys(b.name for row in report.rows for b in row.baselines if b.ms is not None))
    labels = [f"{row.cell}\n{row.backend}" for row in report.rows]
    height = max(3.0, 0.28 * len(labels) * max(1, len(names)))
    with figure(path, width=9, height=height) as (_, axes):
        for place, name in enumerate(names):
            found = [row.baseline(name) for row in report.rows]
            ratios = [b.ratio if b is not None and b.ratio is not None else float("nan") for b in found]
            width = 0.8 / len(names)
            axes.barh([i + place * width for i in range(len(labels))], ratios, height=width, label=f"{name} / slimkv")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks([i + 0.4 - 0.4 / max(1, len(names)) for i in range(len(labels))], labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("time of the baseline over time of slimkv")
        axes.set_title(f"{report.operation}, {report.device}")
        if names:
            axes.legend(fontsize=7)


def plot_sessions(report: ServeReport, path: Path) -> None:
    """The sessions phase as an SVG file: hit rate, time to first token and tokens per second of each system."""
    found = {name: x["sessions"] for name, x in report.systems.items() if "sessions" in x}
    if not found:
        raise InputError("a chart of sessions needs a system that finished the sessions phase")
    panels = [
        (f"prompt tokens found in a cache of {report.settings.held:.0%} of all sessions", "hit_share", "{:.0%}"),
        ("seconds to the first token, median", "time_to_first_token_p50", "{:.2f} s"),
        ("seconds to the first token, 99th percentile", "time_to_first_token_p99", "{:.2f} s"),
        ("tokens per second of all users", "output_tokens_per_second", "{:,.0f}"),
    ]
    drawn = [
        bars(told, [Bar(name, x[key], fmt.format(x[key]), is_stock(name)) for name, x in found.items()])
        for told, key, fmt in panels
        if any(x[key] > 0 for x in found.values())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(stacked("Multi-turn sessions in less memory than they need", drawn), encoding="utf-8")
