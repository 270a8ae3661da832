"""``slimkv suite smoke | quick | full | compare``: quality, bytes and speed of a model's caches in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from slimkv.cli.loading import check_calibration
from slimkv.cli.options import DEFAULT_MODEL, Device, Json, ModelArgument, Threads
from slimkv.cli.output import console, emit, make_table
from slimkv.cli.parsing import check_file, check_folder, option, require_engine, takes
from slimkv.config import AUTO
from slimkv.lab.evals.texts import load_text
from slimkv.lab.suite import compare
from slimkv.lab.suite.parts import Part
from slimkv.lab.suite.runner import Watcher, run_suite
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
        load_text(settings.text)  # raises if there is none
        if settings.engine == VLLM:
            require_engine(settings.engine)
        if settings.calibration != NO_CALIBRATION:
            check_calibration(settings.calibration)
        _run(settings, output or Path(f"suite-{name}-{Path(model).name}"), threads, as_json)


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


def _run(settings: Any, out: Path, threads: int | None, as_json: bool) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    with Screen() as screen:
        results = run_suite(settings, out, screen)
    header, *rows = table_rows(results)
    table = make_table(f"slimkv suite {results['suite']}: {results['model']}", *header, rows=rows)
    emit(results["summary"] if as_json else results, as_json, table, f"report: {out / 'report.html'}")
    if results["failed"]:
        typer.echo(f"failed: {', '.join(results['failed'])}; see {out / 'parts'}", err=True)
        raise typer.Exit(1)


class Screen(Watcher):
    """Progress on standard error: a bar with an estimate, and a line for each finished part."""

    def __init__(self) -> None:
        self.console = console(stderr=True)
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TextColumn("{task.fields[left]}"))  # fmt: skip
        self.bar: Progress = Progress(*columns, console=self.console, transient=True)
        self.task: TaskID = self.bar.add_task("starting", total=1.0, left="")
        self.count, self.finished, self.left = 0, 0, ""

    def __enter__(self) -> Screen:
        self.bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.bar.stop()

    def begin(self, parts: Sequence[Part], notes: Sequence[str]) -> None:
        """See ``Watcher``."""
        self.count = len(parts)
        for note in notes:
            self.console.print(note)

    def move(self, part: Part, what: str, share: float, seconds_left: float | None) -> None:
        """See ``Watcher``."""
        self.left = "" if seconds_left is None else f"about {_duration(seconds_left)} left"
        self.bar.update(self.task, description=what[:44], completed=share, left=self.left)

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """See ``Watcher``."""
        self.finished += 1
        told = f"finished before, in {_duration(seconds)}" if status == "reused" else f"{status}, {_duration(seconds)}"
        if error is not None:
            told += f": {error.splitlines()[0]}"
        more = f"; {self.left}" if self.left and not self.console.is_terminal else ""
        self.console.print(f"[{self.finished}/{self.count}] {part.title}: {told}{more}", markup=False, highlight=False)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
