"""The plot of ``slimkv bench serve``: the sessions phase."""

from __future__ import annotations

from pathlib import Path

from slimkv.errors import InputError
from slimkv.lab.bench.serve import ServeReport
from slimkv.lab.bench.serve_settings import is_stock
from slimkv.lab.report.charts import Bar, bars
from slimkv.lab.report.plots import write_plots


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
        bars(caption, [Bar(name, x[key], fmt.format(x[key]), is_stock(name)) for name, x in found.items()])
        for caption, key, fmt in panels
        if any(x[key] > 0 for x in found.values())
    ]
    write_plots("Multi-turn sessions in less memory than they need", drawn, path)
