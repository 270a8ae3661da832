"""The root command. A group is a typer app in a file of its own, added here by one line."""

from __future__ import annotations

import typer

from slimkv.cli import bench, cache, calibrate, demo, doctor, eval, eval_model, memory_plan, serve, soak, suite
from slimkv.cli.options import Json

app = typer.Typer(name="slimkv", no_args_is_help=True)
app.command()(demo.demo)
app.command()(memory_plan.plan)
app.command()(calibrate.calibrate)
app.command()(doctor.doctor)
app.command()(serve.serve)
app.command()(soak.soak)
eval_model.add_to(eval.app)
app.add_typer(eval.app)
app.add_typer(bench.app)
app.add_typer(cache.app)
app.add_typer(suite.app)


@app.callback()
def root() -> None:
    """A KV cache of 2-8 bits a number that attention reads directly."""


@app.command()
def version(as_json: Json = False) -> None:
    """Prints the version of slimkv and of the page layout."""
    from slimkv import __version__
    from slimkv.cli.output import emit
    from slimkv.spec import LAYOUT_VERSION

    result = {"slimkv": __version__, "layout": LAYOUT_VERSION}
    emit(result, as_json, f"slimkv {__version__}, page layout {LAYOUT_VERSION}")
