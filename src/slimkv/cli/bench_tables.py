"""Reports of ``slimkv bench`` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimkv.cli.output import make_table
from slimkv.lab.bench.generate import GenerateReport
from slimkv.lab.bench.results import Report
from slimkv.lab.bench.serve import ServeReport, notes, table_rows

if TYPE_CHECKING:
    from rich.table import Table

_TIMES = "\N{MULTIPLICATION SIGN}"


def report_table(report: Report) -> list[Table | str]:
    """``bench attend`` and ``bench store``."""
    names = list(dict.fromkeys(b.name for row in report.rows for b in row.baselines))
    title = f"{report.operation} on {report.device}, copy {report.copy_bytes_per_second / 1e12:.3f} TB/s"
    header = ("cell", "backend", "format", "ms", "of copy", "TFLOP/s", "error", *names)
    table = make_table(f"{title}; {_TIMES} is the baseline's time over slimkv's", *header, left=3)
    for row in report.rows:
        found = [row.baseline(name) for name in names]
        table.add_row(
            row.cell, row.backend, row.format, f"{row.ms:.4f}", f"{row.fraction_of_copy:.1%}",
            "" if row.tflops is None else f"{row.tflops:.1f}", "" if row.error is None else f"{row.error:.1e}",
            *("-" if b is None or b.ratio is None else f"{b.ratio:.2f}{_TIMES}" for b in found),
        )  # fmt: skip
    lines = [f"rotation ({r.backend}): {r.without_ms:.4f} ms without, {r.with_ms:.4f} ms with" for r in report.rotation]
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None}
    lines += [f"{name} is absent: {detail}" for name, detail in absent.items()]
    return [table, *lines, "  ".join(f"{name} {version}" for name, version in report.versions.items())]


def generation_table(report: GenerateReport) -> Table:
    """``bench generate``."""
    settings = report.settings
    title = f"decoding at {settings.context} tokens, batch {settings.batch}, {report.run.device}"
    header = ("cache", "tokens/s", "ms/step", "over stock", "lengths met before: ms/step", "over stock", "cache bytes")
    table = make_table(title, *header, "of bf16", "prefill s")
    for row in report.rows:
        table.add_row(
            row.cache, f"{row.tokens_per_second:.1f}", f"{row.milliseconds_per_step:.2f}", f"{row.over_stock:.2f}x",
            f"{row.milliseconds_per_step_again:.2f}", f"{row.over_stock_again:.2f}x", f"{row.cache_bytes:,}",
            f"{row.bytes_of_bf16:.3f}", f"{row.prefill_seconds:.2f}",
        )  # fmt: skip
    return table


def serving_table(report: ServeReport) -> list[Table | str]:
    """``bench serve``."""
    header, *rows = table_rows(report)
    return [make_table(f"serving {report.settings.shape}, {report.device}", *header, rows=rows), *notes(report)]
