"""``slimkv bench``: the commands of ``slimkv.lab.bench.commands``, whose options are theirs alone."""

from __future__ import annotations

from collections.abc import Callable

import typer

app = typer.Typer(name="bench", help="Time slimkv beside the baselines that can run here.", no_args_is_help=True)
_ALL_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _command(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        from slimkv.lab.bench.commands import main

        raise typer.Exit(main([name, *context.args], program="slimkv bench"))

    return run


for _name, _help in (
    ("attend", "Attention on packed pages: decode, speculative verification, prefill."),
    ("store", "Writing K and V to packed pages: a prefill chunk, a decode step."),
    ("generate", "Decoding through transformers, beside the stock cache."),
    ("serve", "Engines under load, stock caches beside slimkv's."),
):
    app.command(_name, help=_help, context_settings=_ALL_OPTIONS, add_help_option=False)(_command(_name))
