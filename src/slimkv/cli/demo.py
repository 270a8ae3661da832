"""``slimkv demo``: the main job, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.options import AUTO, DEFAULT_MODEL, Device, Dtype, Json, Model, Threads, check_folder

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.lab.demo import DemoReport


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report.", callback=check_folder)
    ] = Path("out"),
    model: Model = DEFAULT_MODEL,
    format: Annotated[
        str, typer.Option("--format", help="The packed cache to show beside the stock one.")
    ] = "k4v4+cal",
    calibration: Annotated[
        str, typer.Option(help="A file from slimkv calibrate; auto: made once for each model and kept.")
    ] = AUTO,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Use synthetic keys and values, no model.")] = False,
    head_dim: Annotated[int, typer.Option(help="Head size of the synthetic keys and values.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic keys and values.")] = 0,
    as_json: Json = False,
) -> None:
    """Let a model answer from stock and packed caches side by side; write quality and bytes to out/report.html."""
    if synthetic:
        _synthetic(output, head_dim, seed, as_json)
    else:
        from slimkv.cli import demo_model

        demo_model.run(model, output, format, calibration, threads, device, dtype, as_json)


def _synthetic(out: Path, head_dim: int, seed: int, as_json: bool) -> None:
    """Compresses synthetic keys and values: bytes, distortion and attention error of every width."""
    from slimkv.cli.output import console, emit
    from slimkv.lab.demo import run_demo

    with console(stderr=True).status("starting") as status:
        report = run_demo(out, head_dim, seed=seed, step=status.update)
    emit(report, as_json, *([] if as_json else [*_tables(report), f"plot: {report.plot}  ({report.seconds:.1f} s)"]))


def _tables(report: DemoReport) -> list[Table]:
    from rich.table import Table

    sizes = Table(title=f"head size {report.head_dim}: bytes per token and KV head, and relative errors")
    for name in ("format", "bytes/token/head", "of bf16", "distortion", "keys", "values", "attention output"):
        sizes.add_column(name, justify="left" if name == "format" else "right")
    for row in report.widths:
        size = f"{row.bytes_per_token_per_head:.0f}", f"1/{row.ratio_to_bf16:.2f}", f"{row.distortion:.6f}"
        sizes.add_row(row.format, *size, f"{row.key_error:.4f}", f"{row.value_error:.4f}", f"{row.output_error:.4f}")
    rotation = Table(title="heavy-tailed K/V: uniform (u), uniform rotated (ur), Lloyd-Max rotated (k4v4)")
    for name in ("format", "bytes/token/head", "keys", "values", "attention output"):
        rotation.add_column(name, justify="left" if name == "format" else "right")
    for error in report.robustness:
        numbers = (
            f"{error.bytes_per_token_per_head:.0f}",
            f"{error.key:.4f}",
            f"{error.value:.4f}",
            f"{error.output:.4f}",
        )
        rotation.add_row(error.format, *numbers)
    return [sizes, rotation]
