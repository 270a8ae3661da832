"""The root command. Every command or group of commands has its own file, which is imported when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slimkv import __version__
from slimkv.cli.errors import OneLineErrors

COMMANDS = {  # with the first sentence of their help, because importing them imports torch, which takes seconds
    "demo": "Let a model answer with stock and packed caches side by side; write quality and bytes to report.html.",
    "plan": "Print bytes per token and tokens that fit, for each format and kind of layer.",
    "serve": "Serve a model with a packed cache: slimkv serve MODEL -- --port 8000.",
    "calibrate": "Run a model once and write the query statistics that query-aware rounding needs.",
    "doctor": "Show what this machine can run and what is wrong; exit code 1 if a required part cannot run.",
    "soak": "Load-test a local vllm serve with a packed cache; exit code 1 if a check fails.",
    "eval": "Measure the quality loss of a format.",
    "bench": "Time slimkv and the baselines that run on this machine.",
    "cache": "Inspect prompt-cache files.",
    "suite": "Measure quality, bytes and speed of a model's caches, in one folder.",
}


def load(name: str) -> Any:
    """Imports one of ``COMMANDS``."""
    module = import_module(f"slimkv.cli.{'memory_plan' if name == 'plan' else name}")
    found = typer.Typer()
    if hasattr(module, "app"):
        found.add_typer(module.app)
    else:
        found.command()(getattr(module, name))
    return typer.main.get_group(found).commands[name]


class _Commands(OneLineErrors):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands.update({name: TyperCommand(name, help=told) for name, told in COMMANDS.items()})

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        """Replaces the command that runs, of which only the help is known."""
        if words and words[0] in COMMANDS:
            self.commands[words[0]] = load(words[0])
        return super().resolve_command(context, words)


app = typer.Typer(name="slimkv", cls=_Commands, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slimkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Quantize the KV cache to 2-8 bits per value: plan, calibrate, measure."""
