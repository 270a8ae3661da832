"""``slimkv doctor``: what this machine can run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from slimkv.cli.eval import score_table
from slimkv.cli.loading import check_caches, load_quietly, progress_bar
from slimkv.cli.options import Device, Json
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import comma_list, given, option
from slimkv.config import AUTO
from slimkv.doctor import diagnose
from slimkv.errors import InputError
from slimkv.lab.evals.scores import measure_scores


def doctor(
    context: typer.Context,
    require: Annotated[str | None, option("Parts that must work, such as cuda,transformers,vllm,sglang.")] = None,
    model: Annotated[str | None, option("Also measure the noise of quantized keys in each layer of a model.")] = None,
    format: Annotated[str, option("The format whose noise is measured.")] = "k4v4",
    device: Device = AUTO,
    as_json: Json = False,
) -> None:
    """Show what this machine can run and what is wrong; exit code 1 if a required part cannot run.

    With --model, also check the score error of every layer: exit code 1 if a layer exceeds the guard's limit.
    """
    if model is not None:
        if require is not None:
            raise InputError("--require and --model are two checks: run slimkv doctor once with each")
        check_caches([format], keys=True)
        _doctor_model(model, format, device, as_json)
        return
    if unused := given(context, "format", "device"):
        raise InputError(f"options for --model only: {' and '.join(unused)}. Add --model, or leave them out")
    result = diagnose([] if require is None else comma_list("--require", require))
    table = make_table("slimkv doctor", "", "what", "version", "detail", left=4)
    for check in result.checks:
        mark = Text("needed", "red") if check.name in result.failed else Text("no", "yellow")
        table.add_row(Text("ok", "green") if check.works else mark, check.name, check.version or "-", check.detail)
    emit(result, as_json, table)
    if result.failed:
        typer.echo(f"required but cannot run: {', '.join(result.failed)}", err=True)
        raise typer.Exit(1)


def _doctor_model(model: str, format: str, device: str, as_json: bool) -> None:
    from slimkv.integrations.transformers.calibration.offsets import TOKENS
    from slimkv.integrations.transformers.calibration.samples import random_windows

    with progress_bar() as progress:
        loaded = load_quietly(model, None, device, "float32", progress)
        ids = random_windows(loaded.model.config, 1, TOKENS)
        report = measure_scores(loaded.model, ids, [format], name=model, progress=progress)
    emit(report, as_json, score_table(report))
    if not all(row.healthy for row in report.rows):
        typer.echo(
            f"keys of {model} do not survive {format}: calibrate it, or give its worst layers more bits", err=True
        )
        raise typer.Exit(1)
