"""``slimkv doctor``: what this machine can run."""

from __future__ import annotations

from typing import Annotated

import typer

from slimkv.cli.options import Json, comma_list


def doctor(
    require: Annotated[str, typer.Option(help="What must work, such as triton,cuda,transformers,vllm,sglang.")] = "",
    as_json: Json = False,
) -> None:
    """What this machine can run and what is wrong; exit code 1 if something required cannot run."""
    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.doctor import diagnose

    result = diagnose(comma_list(require, str))
    table = Table(title="slimkv doctor")
    for name in ("", "what", "version", "detail"):
        table.add_column(name)
    for check in result.checks:
        mark = "[green]ok[/]" if check.works else "[red]needed[/]" if check.name in result.failed else "[yellow]no[/]"
        table.add_row(mark, check.name, check.version or "-", check.detail.replace("[", r"\["))
    emit(result, as_json, table)
    if result.failed:
        typer.echo(f"required but cannot run: {', '.join(result.failed)}", err=True)
        raise typer.Exit(1)
