"""``slimkv bench attend | store | generate | serve``: timings of slimkv and of the baselines on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from slimkv.cli.loading import check_caches
from slimkv.cli.options import Device, Json, Output, Plot, Threads
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import check_folder, option, takes
from slimkv.config import AUTO
from slimkv.errors import InputError
from slimkv.lab.bench.attention import bench_attend
from slimkv.lab.bench.generate import CPU_SIZES, GenerateReport, GenerateSettings, time_generation
from slimkv.lab.bench.results import Report
from slimkv.lab.bench.run import Options
from slimkv.lab.bench.serve import bench_serve, notes, plot_sessions, table_rows
from slimkv.lab.bench.serve_settings import SESSIONS, ServeSettings
from slimkv.lab.bench.store import bench_store
from slimkv.lab.engine_process import require_engine
from slimkv.ops.cuda.device import hold_to

_TIMES = "\N{MULTIPLICATION SIGN}"
app = typer.Typer(name="bench", help="Time slimkv and the baselines that run on this machine.", no_args_is_help=True)


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _add_operation(name: str, told: str) -> None:
    @app.command(name, help=told)
    @takes(Options)
    def command(
        options: dict[str, Any],
        device: Device = AUTO,
        quiet: Annotated[bool, option("No progress on standard error.", "--quiet")] = False,
        output: Output = None,
        as_json: Json = False,
    ) -> None:
        settings = Options(**options, device=device)
        if settings.as_device is not None:
            hold_to(settings.as_device)
        report = (bench_attend if name == "attend" else bench_store)(settings, (lambda step: None) if quiet else _say)
        emit(report, as_json, *([] if as_json else report_table(report)), output=output)


_add_operation("attend", "Time attention on packed pages: decode, speculative verification, prefill.")
_add_operation("store", "Time writing K and V to packed pages: a prefill chunk, a decode step.")


@app.command()
@takes(GenerateSettings, unset=tuple(CPU_SIZES))
def generate(
    options: dict[str, Any],
    device: Device = AUTO,
    threads: Threads = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time decoding through transformers with a packed cache and with DynamicCache."""
    if {"model", "layers"} <= options.keys():
        raise InputError("--layers is for the random-weight model: leave out --layers or --model")
    settings = GenerateSettings(**({} if device != "cpu" else CPU_SIZES) | options, device=device)
    check_caches(settings.formats)
    if threads is not None:
        torch.set_num_threads(threads)
    report = time_generation(settings)
    emit(report, as_json, *([] if as_json else [generation_table(report)]), output=output)


@app.command()
@takes(ServeSettings)
def serve(
    options: dict[str, Any],
    plot: Plot = None,
    folder: Annotated[Path | None, option("Folder for each system's JSON and log.", callback=check_folder)] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Load-test an engine with stock and packed caches: capacity, decoding, full memory, arrivals."""
    settings = ServeSettings(**options)
    require_engine(settings.engine)
    if plot is not None and SESSIONS not in settings.phases:
        raise InputError(f"--plot draws the phase {SESSIONS}: add it to --phases, or leave --plot out")
    report = bench_serve(settings, _say, folder)
    if plot is not None:
        plot_sessions(report, plot)
    header, *rows = table_rows(report)
    table = make_table(f"serving {settings.shape}, {report.device}", *header, rows=rows)
    emit(report, as_json, table, *notes(report), output=output)
    if any("error" in system for system in report.systems.values()):
        raise typer.Exit(1)


def report_table(report: Report) -> list[Table | str]:
    """The report of ``bench attend`` or ``bench store`` as a table, and the lines below it."""
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
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None}
    lines = [f"{name} is absent: {detail}" for name, detail in absent.items()]
    return [table, *lines, "  ".join(f"{name} {version}" for name, version in report.versions.items())]


def generation_table(report: GenerateReport) -> Table:
    """The report of ``bench generate`` as a table."""
    settings = report.settings
    title = f"decoding at {settings.context} tokens, batch {settings.batch}, {report.run.device}"
    header = ("cache", "tokens/s", "ms/step", "over stock", "cache bytes", "of bf16", "prefill s")
    table = make_table(title, *header)
    for row in report.rows:
        table.add_row(
            row.cache, f"{row.tokens_per_second:.1f}", f"{row.milliseconds_per_step:.2f}", f"{row.over_stock:.2f}x",
            f"{row.cache_bytes:,}", f"{row.bytes_of_bf16:.3f}", f"{row.prefill_seconds:.2f}",
        )  # fmt: skip
    return table
