"""``slimkv bench attend | store | generate | serve``: timings, next to the baselines that run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slimkv.cli.options import (
    AUTO,
    DTYPES,
    Device,
    Json,
    Output,
    Plot,
    Threads,
    check_folder,
    comma_list,
    count,
    one_of,
    require_engine,
    takes,
)
from slimkv.lab.bench.serve_settings import ServeSettings

app = typer.Typer(name="bench", help="Time slimkv and the baselines that run on this machine.", no_args_is_help=True)


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _add_operation(name: str, told: str) -> None:
    @app.command(name, help=told)
    def command(
        cells: Annotated[str, typer.Option(help="Cells by name or pattern, such as decode-*,prefill-*, or all.")] = "",
        backend: Annotated[
            str, typer.Option(help="Backends to time, such as cuda,triton; default: the device's own.")
        ] = "",
        device: Device = AUTO,
        page: Annotated[int | None, count("Tokens per page; default: the cell's own.")] = None,
        no_baselines: Annotated[bool, typer.Option("--no-baselines", help="Time slimkv alone.")] = False,
        small: Annotated[bool, typer.Option("--small", help="Use the small cells of a CPU, even on a GPU.")] = False,
        as_device: Annotated[
            str, typer.Option(help="Hold the GPU to the features and shared memory of a100, b300, rtx4090 or rtx5090.")
        ] = "",
        plot: Plot = None,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False,
        output: Output = None,
        as_json: Json = False,
    ) -> None:
        from slimkv.cli.bench_tables import report_table
        from slimkv.cli.output import emit
        from slimkv.lab.bench.attention import bench_attend
        from slimkv.lab.bench.run import Options
        from slimkv.lab.bench.store import bench_store
        from slimkv.ops.cuda.device import hold_to

        options = Options(
            comma_list(cells, str), comma_list(backend, str), device, page, not no_baselines, small, as_device or None
        )
        if as_device:
            hold_to(as_device)
        report = (bench_attend if name == "attend" else bench_store)(options, (lambda step: None) if quiet else _say)
        if plot is not None:
            from slimkv.lab.bench.plot import plot as draw

            draw(report, plot)
        emit(report, as_json, *([] if as_json else report_table(report)), output=output)


_add_operation("attend", "Time attention on packed pages: decode, speculative verification, prefill.")
_add_operation("store", "Time writing K and V to packed pages: a prefill chunk, a decode step.")


@app.command()
def generate(
    model: Annotated[str | None, typer.Option(help="A model; default: a Llama with random weights.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Formats to time, such as k4v4,k6v6.")] = "k4v4",
    context: Annotated[
        int | None, count("Tokens in the cache before decoding; default: 32768 on a GPU, 1024 on a CPU.")
    ] = None,
    batch: Annotated[int, count("Sequences in the batch.")] = 1,
    new_tokens: Annotated[int, count("Decode steps to time.")] = 64,
    layers: Annotated[int | None, count("Layers of the random-weight model; default: 8 on a GPU, 2 on a CPU.")] = None,
    rounds: Annotated[int, count("Rounds to take the median of.")] = 3,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the model: auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16 or float16.",
            callback=one_of("--dtype", AUTO, *DTYPES),
        ),
    ] = AUTO,
    device: Device = AUTO,
    threads: Threads = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time decoding through transformers with a packed cache and with DynamicCache."""
    import torch

    from slimkv.cli.bench_tables import generation_table
    from slimkv.cli.output import emit
    from slimkv.lab.bench.generate import GenerateSettings, time_generation
    from slimkv.lab.evals.harness import check_formats

    names, gpu = comma_list(formats, str), device != "cpu"
    check_formats(names, calibrated=False)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = GenerateSettings(
        model=model, formats=tuple(names), context=context or (32768 if gpu else 1024), batch=batch,
        new_tokens=new_tokens, layers=layers or (8 if gpu else 2), rounds=rounds,
        dtype=dtype if dtype != AUTO else "bfloat16" if gpu else "float32", device=device,
    )  # fmt: skip
    report = time_generation(settings)
    emit(report, as_json, *([] if as_json else [generation_table(report)]), output=output)


@app.command()
@takes(ServeSettings)
def serve(
    options: dict[str, Any],
    plot: Annotated[Path | None, typer.Option(help="Draw the sessions phase as SVG.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep each system's JSON and log in this folder.", callback=check_folder)
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Load an engine with stock caches and with slimkv's: capacity, decoding, full memory, arrivals."""
    from slimkv.cli.bench_tables import serving_table
    from slimkv.cli.output import emit
    from slimkv.lab.bench.serve import bench_serve
    from slimkv.lab.provenance import provenance

    settings = ServeSettings(**options)
    require_engine(settings.engine)
    report = bench_serve(settings, _say, provenance().command, folder)
    if plot is not None:
        from slimkv.lab.bench.plot import plot_sessions

        plot_sessions(report, plot)
    emit(report, as_json, *([] if as_json else serving_table(report)), output=output)
    if any("error" in system for system in report.systems.values()):
        raise typer.Exit(1)
