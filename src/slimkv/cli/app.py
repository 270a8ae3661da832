"""The root command. Every group of commands is a typer app in its own file."""

from __future__ import annotations

from typing import Annotated

import typer

from slimkv.cli import bench, cache, calibrate, demo, doctor, eval, memory_plan, serve, soak, suite
from slimkv.cli.errors import OneLineErrors

app = typer.Typer(name="slimkv", cls=OneLineErrors, no_args_is_help=True)
app.command()(demo.demo)
app.command()(memory_plan.plan)
app.command()(serve.serve)
app.command()(calibrate.calibrate)
app.command()(doctor.doctor)
app.command()(soak.soak)
app.add_typer(eval.app)
app.add_typer(bench.app)
app.add_typer(cache.app)
app.add_typer(suite.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from slimkv import __version__

        typer.echo(f"slimkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Quantize the KV cache to 2-8 bits per value: plan, calibrate, measure."""
