"""``slimkv bench``: times on this machine, beside the baselines that can run here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli import bench_generate, bench_serve
from slimkv.cli.options import Json, comma_list, user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.bench.results import Report

app = typer.Typer(name="bench", help="Time store and attend beside the baselines.", no_args_is_help=True)

Cells = Annotated[str, typer.Option(help="Names or patterns of cells, such as decode-*,prefill-*; default: all.")]
Impls = Annotated[str, typer.Option("--backend", help="Implementations, such as triton,reference.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]
Page = Annotated[int | None, typer.Option(help="Tokens per page; default: the cell's own.")]
Baselines = Annotated[bool, typer.Option(help="Time the baselines as well.")]
Small = Annotated[bool, typer.Option(help="The small cells, even on a GPU.")]
Plot = Annotated[Path | None, typer.Option(help="Write a PNG here.")]
Output = Annotated[Path | None, typer.Option(help="Write the JSON here as well.")]


app.command()(bench_generate.generate)
app.command()(bench_serve.serve)


@app.callback()
def root() -> None:
    """Time store and attend beside the baselines."""


@app.command()
def attend(
    cells: Cells = "",
    backends: Impls = "",
    device: Device = None,
    page: Page = None,
    baselines: Baselines = True,
    small: Small = False,
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Attention on packed pages: decode, speculative verification, prefill (small cells on a CPU)."""
    _run("attend", cells, backends, device, page, baselines, small, plot, output, as_json)


@app.command()
def store(
    cells: Cells = "",
    backends: Impls = "",
    device: Device = None,
    page: Page = None,
    baselines: Baselines = True,
    small: Small = False,
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Writing K and V to packed pages: a prefill chunk, a decode step (small cells on a CPU)."""
    _run("store", cells, backends, device, page, baselines, small, plot, output, as_json)


def _run(
    operation: str,
    cells: str,
    backends: str,
    device: str | None,
    page: int | None,
    baselines: bool,
    small: bool,
    picture: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from slimkv.bench.attention import bench_attend
    from slimkv.bench.options import Options
    from slimkv.bench.store import bench_store
    from slimkv.cli.output import console, emit

    options = Options(comma_list(cells, str), comma_list(backends, str), device, page, baselines, small)
    with user_errors(), console(stderr=True).status("starting") as status:
        report = (bench_attend if operation == "attend" else bench_store)(options, status.update)
        if output is not None:
            report.save(output)
        if picture is not None:
            from slimkv.bench.plot import plot

            plot(report, picture)
    emit(asdict(report), as_json, *([] if as_json else [_table(report), *_lines(report)]))


def _table(report: Report) -> Table:
    from rich.table import Table

    title = f"{report.operation} on {report.device}, copy {report.copy_bytes_per_second / 1e12:.3f} TB/s"
    table = Table(title=title + "; \N{MULTIPLICATION SIGN} is the baseline's time over slimkv's")
    names = list(dict.fromkeys(b.name for row in report.rows for b in row.baselines))
    for name in ("cell", "backend", "format", "ms", "of copy", "TFLOP/s", "error", *names):
        table.add_column(
            name, justify="left" if name in ("cell", "backend", "format") else "right", no_wrap=name == "cell"
        )
    for row in report.rows:
        tflops = "" if row.tflops is None else f"{row.tflops:.1f}"
        error = "" if row.error is None else f"{row.error:.1e}"
        found = [row.baseline(name) for name in names]
        ratios = ["-" if b is None or b.ratio is None else f"{b.ratio:.2f}\N{MULTIPLICATION SIGN}" for b in found]
        table.add_row(
            row.cell, row.backend, row.format, f"{row.ms:.4f}", f"{row.fraction_of_copy:.1%}", tflops, error, *ratios
        )
    return table


def _lines(report: Report) -> list[str]:
    lines = [f"rotation ({r.backend}): {r.without_ms:.4f} ms without, {r.with_ms:.4f} ms with" for r in report.rotation]
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None}
    lines += [f"{name} is absent: {detail}".replace("[", r"\[") for name, detail in absent.items()]
    return [*lines, "  ".join(f"{name} {version}" for name, version in report.versions.items())]
