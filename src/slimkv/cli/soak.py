"""``slimkv soak``: a stress test of a live server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from slimkv.cli.options import DEFAULT_MODEL, Json, Output
from slimkv.cli.output import console, emit, make_table
from slimkv.cli.parsing import check_folder, option, takes
from slimkv.lab.engine_process import require_engine
from slimkv.lab.soak.run import SoakReport, soak_server
from slimkv.lab.soak.settings import SoakSettings


@takes(SoakSettings)
def soak(
    options: dict[str, Any],
    model: Annotated[str, typer.Argument(help="A packaged model, folder, or name that vLLM knows.")] = DEFAULT_MODEL,
    output: Output = None,
    logs: Annotated[Path | None, option("Folder for the server's log.", callback=check_folder)] = None,
    as_json: Json = False,
) -> None:
    """Load-test a local vllm serve with a packed cache; exit code 1 if a check fails."""
    settings = SoakSettings(model, **options)
    require_engine("vllm")
    report = soak_server(settings, console(stderr=True).print, logs)
    emit({"passed": report.passed, **asdict(report)}, as_json, *([] if as_json else _tables(report)), output=output)
    if not report.passed:
        failed = ", ".join(check.name for check in report.checks if not check.passed)
        typer.echo(f"failed: {failed}", err=True)
        raise typer.Exit(1)


def _tables(report: SoakReport) -> list[Table]:
    settings, counts = report.settings, report.requests
    title = f"{settings.model}, {settings.format}, on {report.platform}: {report.seconds:.0f} s of load"
    table = make_table(title, "", "check", "detail", left=3)
    for check in report.checks:
        mark = Text("ok", "green") if check.passed else Text("FAILED", "red")
        table.add_row(mark, check.name, check.detail)
    header = ("served", "answered", "streamed", "cancelled", "failed", "tokens", "p50 s", "p99 s", "sleeps")
    numbers = make_table("load", *header, left=0)
    latency = [f"{report.latency_seconds[p]:.2f}" if p in report.latency_seconds else "-" for p in ("p50", "p99")]
    fields = ("finished", "streamed", "cancelled", "failed", "tokens")
    numbers.add_row(str(report.served), *(f"{counts[name]:,}" for name in fields), *latency, report.sleeps)
    return [table, numbers]
