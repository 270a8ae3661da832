"""A picture of a report: how many times faster than each baseline."""

from __future__ import annotations

from pathlib import Path

from slimkv.lab.bench.results import Report
from slimkv.lab.evals.plots import figure


def plot(report: Report, path: Path) -> None:
    """Bars per cell and implementation; one colour per baseline; 1 is as fast as slimkv."""
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
