"""``slimkv soak``: a stress test of a live server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.options import DEFAULT_MODEL, Json, Output, check_folder, require_engine

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.lab.soak import SoakReport


def soak(
    model: Annotated[
        str, typer.Argument(help="A packaged model, a folder, or a name that vLLM finds.")
    ] = DEFAULT_MODEL,
    format: Annotated[str, typer.Option(help="Format of the packed cache; stock: vLLM's own cache.")] = "k4v4",
    seconds: Annotated[float, typer.Option(help="Duration of the load.")] = 300.0,
    requests: Annotated[int, typer.Option(help="Maximum number of requests.")] = 100_000,
    concurrency: Annotated[int, typer.Option(help="Maximum number of requests in flight.")] = 12,
    rate: Annotated[float, typer.Option(help="Arrivals per second outside bursts.")] = 2.0,
    cancelled: Annotated[float, typer.Option(help="Fraction of requests whose client disconnects.")] = 0.3,
    cache_tokens: Annotated[
        int, typer.Option(help="Size of the KV cache in tokens; small, so that vLLM preempts.")
    ] = 2048,
    max_model_len: Annotated[int, typer.Option(help="Maximum tokens of one request.")] = 768,
    answers: Annotated[int, typer.Option(help="Number of greedy answers that must not change.")] = 8,
    request_seconds: Annotated[
        float, typer.Option(help="Time after which an unanswered request counts as failed.")
    ] = 300.0,
    growth_mib: Annotated[float, typer.Option(help="MiB by which memory may grow after a third of the load.")] = 32.0,
    dtype: Annotated[str, typer.Option(help="Data type of weights and activations.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the random load.")] = 0,
    faults: Annotated[
        int,
        typer.Option(
            min=0, help="Serve nothing; damage files of stores so often, kill their writers, fill their disk."
        ),
    ] = 0,
    output: Output = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the server's log in this folder.", callback=check_folder)
    ] = None,
    as_json: Json = False,
) -> None:
    """Load-test a local vllm serve with a packed cache; exit code 1 if a check fails."""
    from dataclasses import asdict

    from slimkv.cli.output import console, emit
    from slimkv.lab.soak import SoakSettings, soak_server

    if faults:
        _soak_faults(faults, seed, as_json, output)
        return
    settings = SoakSettings(
        model, format, seconds, requests, concurrency, rate, cancelled, cache_tokens, max_model_len,
        answers=answers, request_seconds=request_seconds, growth_mib=growth_mib, dtype=dtype, seed=seed,
    )  # fmt: skip
    require_engine("vllm")
    report = soak_server(settings, console(stderr=True).print, logs)
    emit({"passed": report.passed, **asdict(report)}, as_json, *([] if as_json else _tables(report)), output=output)
    if not report.passed:
        failed = ", ".join(check.name for check in report.checks if not check.passed)
        typer.echo(f"failed: {failed}", err=True)
        raise typer.Exit(1)


def _soak_faults(count: int, seed: int, as_json: bool, output: Path | None) -> None:
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from slimkv.cli.output import emit, make_table
    from slimkv.lab.soak.faults import soak_faults

    with TemporaryDirectory() as folder:
        report = soak_faults(count, Path(folder), seed)
    answers = f"{report.right} right, {report.missed} missed, {report.wrong} wrong, {len(report.broken)} broken"
    counted = ((name, str(times)) for name, times in report.faults.items())
    table = make_table(f"{count} faults: {answers}", "fault", "times", left=2, rows=counted)
    emit({"passed": report.passed, **asdict(report)}, as_json, *([] if as_json else [table]), output=output)
    if not report.passed:
        typer.echo(f"failed: {answers}; {'; '.join(report.broken[:3])}", err=True)
        raise typer.Exit(1)


def _tables(report: SoakReport) -> list[Table]:
    from slimkv.cli.output import make_table

    settings, counts = report.settings, report.requests
    title = f"{settings.model}, {settings.format}, on {report.platform}: {report.seconds:.0f} s of load"
    table = make_table(title, "", "check", "detail", left=3)
    for check in report.checks:
        mark = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(mark, check.name, check.detail.replace("[", r"\["))
    header = ("served", "answered", "streamed", "given up", "failed", "tokens", "p50 s", "p99 s", "sleeps")
    numbers = make_table("load", *header, left=0)
    latency = [f"{report.latency_seconds[p]:.2f}" if p in report.latency_seconds else "-" for p in ("p50", "p99")]
    fields = ("finished", "streamed", "cancelled", "failed", "tokens")
    numbers.add_row(str(report.served), *(f"{counts[name]:,}" for name in fields), *latency, report.sleeps)
    return [table, numbers]
