"""``slimkv suite smoke | quick | full | compare``: quality, bytes and speed of a model's caches in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markdown import Markdown

from slimkv.cli.loading import check_caches, progress_bar
from slimkv.cli.options import DEFAULT_MODEL, Device, Json, ModelArgument, Threads
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import check_file, check_folder, option, takes
from slimkv.config import AUTO
from slimkv.lab.engine_process import require_engine
from slimkv.lab.evals.texts import load_text
from slimkv.lab.suite import compare
from slimkv.lab.suite.lm_eval import import_lm_eval
from slimkv.lab.suite.runner import run_suite
from slimkv.lab.suite.settings import NO_CALIBRATION, VLLM, Size, SuiteSettings, make_settings
from slimkv.lab.suite.written import read_results, table_rows

app = typer.Typer(
    name="suite", help="Measure quality, bytes and speed of a model's caches, in one folder.", no_args_is_help=True
)

_SIZES = {
    "smoke": "Measure a little of everything for five caches, in minutes.",
    "quick": "Measure nine caches, paired by bytes, within an hour.",
    "full": "Measure every length that the model allows, overnight.",
}


def _add(name: str, told: str) -> None:
    @app.command(name, help=told)
    @takes(Size, SuiteSettings, unset=("dtype", "memory"))
    def command(
        options: dict[str, Any],
        model: ModelArgument = DEFAULT_MODEL,
        output: Annotated[
            Path | None,
            option("Folder for the report; an interrupted run resumes there.", "--output", "-o", callback=check_folder),
        ] = None,
        device: Device = AUTO,
        threads: Threads = None,
        as_json: Json = False,
    ) -> None:
        settings = make_settings(name, model, device=device, **options)
        load_text(settings.text)  # raises if it cannot be read
        if settings.engine == VLLM:
            require_engine(settings.engine)
        if settings.tasks:
            import_lm_eval()
        check_caches(settings.formats, None if settings.calibration == NO_CALIBRATION else settings.calibration)
        if threads is not None:
            torch.set_num_threads(threads)
        out = output or Path(f"suite-{name}-{Path(model).name}")
        with progress_bar(lines=False) as progress:
            results = run_suite(settings, out, progress, lambda line: typer.echo(line, err=True))
        header, *rows = table_rows(results)
        table = make_table(f"slimkv suite {results['suite']}: {results['model']}", *header, rows=rows)
        emit(results["summary"] if as_json else results, as_json, table, f"report: {out / 'report.html'}")
        if results["failed"]:
            typer.echo(f"failed: {', '.join(results['failed'])}; see {out / 'parts'}", err=True)
            raise typer.Exit(1)


for _name, _told in _SIZES.items():
    _add(_name, _told)


@app.command("compare")
def compare_runs(
    a: Annotated[Path, typer.Argument(help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(help="Folder of another run.")],
    output: Annotated[
        Path | None, option("Write the comparison to this Markdown file.", "--output", "-o", callback=check_file)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs: their settings, and all figures that both contain."""
    found = compare.compare(read_results(a), read_results(b), str(a), str(b))
    text = compare.as_markdown(found)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    emit(found, as_json, Markdown(text))
