"""Reports as a person reads them: tables where rich is installed, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slimkv.lab.bench.generate import GenerateReport
from slimkv.lab.bench.generate import text_lines as generation_lines
from slimkv.lab.bench.results import Report, text_lines
from slimkv.lab.bench.serve import ServeReport, table_rows
from slimkv.lab.bench.serve import text_lines as serving_lines

_TIMES = "\N{MULTIPLICATION SIGN}"


def show_report(report: Report) -> None:
    """``bench attend`` and ``bench store``."""
    title = f"{report.operation} on {report.device}, copy {report.copy_bytes_per_second / 1e12:.3f} TB/s"
    names = list(dict.fromkeys(b.name for row in report.rows for b in row.baselines))
    rows = []
    for row in report.rows:
        found = [row.baseline(name) for name in names]
        rows.append([
            row.cell, row.backend, row.format, f"{row.ms:.4f}", f"{row.fraction_of_copy:.1%}",
            "" if row.tflops is None else f"{row.tflops:.1f}", "" if row.error is None else f"{row.error:.1e}",
            *("-" if b is None or b.ratio is None else f"{b.ratio:.2f}{_TIMES}" for b in found),
        ])  # fmt: skip
    lines = [f"rotation ({r.backend}): {r.without_ms:.4f} ms without, {r.with_ms:.4f} ms with" for r in report.rotation]
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None}
    lines += [f"{name} is absent: {detail}" for name, detail in absent.items()]
    lines.append("  ".join(f"{name} {version}" for name, version in report.versions.items()))
    header = ["cell", "backend", "format", "ms", "of copy", "TFLOP/s", "error", *names]
    _show(f"{title}; {_TIMES} is the baseline's time over slimkv's", header, rows, lines, text_lines(report), left=3)


def show_generation(report: GenerateReport) -> None:
    """``bench generate``."""
    settings = report.settings
    title = f"decoding at {settings.context} tokens, batch {settings.batch}, {report.run.device}"
    header = ["cache", "tokens/s", "ms/step", "over stock", "lengths met before: ms/step", "over stock", "cache bytes"]
    rows = [
        [
            row.cache, f"{row.tokens_per_second:.1f}", f"{row.milliseconds_per_step:.2f}", f"{row.over_stock:.2f}x",
            f"{row.milliseconds_per_step_again:.2f}", f"{row.over_stock_again:.2f}x", f"{row.cache_bytes:,}",
            f"{row.bytes_of_bf16:.3f}", f"{row.prefill_seconds:.2f}",
        ]
        for row in report.rows
    ]  # fmt: skip
    _show(title, [*header, "of bf16", "prefill s"], rows, [], generation_lines(report))


def show_serving(report: ServeReport) -> None:
    """``bench serve``."""
    header, *rows = table_rows(report)
    plain = serving_lines(report)
    _show(f"serving {report.settings.shape}, {report.device}", header, rows, plain[len(rows) + 1 :], plain)


def _show(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    lines: Iterable[str],
    plain: Iterable[str],
    left: int = 1,
) -> None:
    """A table and the lines below it; ``plain`` where there is no rich."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join(plain))
        return
    table = Table(title=title)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(table)
    for line in lines:
        console.print(line, markup=False)
