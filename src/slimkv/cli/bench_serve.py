"""``slimkv bench serve``: vLLM engines under load, stock caches beside slimkv's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slimkv.cli.options import Json, comma_list, user_errors


def serve(
    systems: Annotated[
        str, typer.Option(help="bf16, fp8, another of vLLM's cache dtypes such as turboquant_4bit_nc, or formats.")
    ] = "bf16,fp8,k4v4",
    phases: Annotated[str, typer.Option(help="What to measure: decode, full, poisson.")] = "decode,full,poisson",
    shape: Annotated[str, typer.Option(help="The model's shape: llama-3.1-8b or tiny.")] = "llama-3.1-8b",
    requests: Annotated[int, typer.Option(help="Requests of the decode phase.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens of their prompts.")] = 16384,
    output: Annotated[int, typer.Option(help="Tokens each of them gets.")] = 96,
    most_requests: Annotated[int, typer.Option(help="Bound of the full phase; 0: what the cache holds.")] = 0,
    arrivals: Annotated[int, typer.Option(help="Requests of the Poisson phase.")] = 80,
    rate: Annotated[float, typer.Option(help="Arrivals per second.")] = 5.0,
    memory: Annotated[float, typer.Option(help="Share of the device's memory for each engine.")] = 0.85,
    eager: Annotated[bool, typer.Option(help="Without torch.compile and CUDA graphs.")] = False,
    limit_seconds: Annotated[int, typer.Option(help="For one system.")] = 600,
    output_file: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep each system's JSON and log here.")] = None,
    as_json: Json = False,
) -> None:
    """Tokens held, decoding, prefill, full memory and Poisson arrivals; one engine after another, dummy weights."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.bench.serve import ServeSettings, bench_serve, table_rows, text_lines
    from slimkv.cli.output import console, emit

    with user_errors(), console(stderr=True).status("starting") as status:
        settings = ServeSettings(
            systems=tuple(comma_list(systems, str)), phases=tuple(comma_list(phases, str)), shape=shape,
            requests=requests,
            context=context, output=output, most_requests=most_requests, arrivals=arrivals, rate=rate, memory=memory,
            eager=eager, limit_seconds=limit_seconds,
        )  # fmt: skip
        report = bench_serve(settings, status.update, " ".join(["slimkv", *sys.argv[1:]]), folder)
        if output_file is not None:
            report.save(output_file)
    header, *rows = table_rows(report)
    table = Table(title=f"serving {shape}, {report.device}")
    for name in header:
        table.add_column(name, justify="left" if name == "cache" else "right")
    for row in rows:
        table.add_row(*row)
    emit(asdict(report), as_json, *([] if as_json else [table, *text_lines(report)[len(rows) + 1 :]]))
    if any("error" in system for system in report.systems.values()):
        raise typer.Exit(1)
