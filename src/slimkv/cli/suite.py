"""``slimkv suite smoke | quick | full | compare``: quality, bytes and speed of a model's caches in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimkv.cli.options import Json, comma_list, user_errors

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from slimkv.lab.suite.parts import Part

app = typer.Typer(
    name="suite", help="Quality, bytes and speed of a model's caches side by side, in one folder.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help="A packaged model, a folder, or a name on the Hugging Face hub.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the report; a run that was interrupted goes on there.")]
Formats = Annotated[str | None, typer.Option("--format", help="Caches beside raw, such as fp8,k4v4,k4v4+cal.")]
Engine = Annotated[str, typer.Option(help="transformers, or vllm: the tasks are answered by a vLLM engine.")]
Tasks = Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, such as hellaswag,gsm8k.")]
TaskFolder = Annotated[Path | None, typer.Option(help="A folder with further task definitions for it.")]
Limit = Annotated[int | None, typer.Option(help="Examples of each of those tasks; default: by size.")]
Lengths = Annotated[str | None, typer.Option(help="Lengths of the synthetic tasks, in tokens.")]
Contexts = Annotated[int | None, typer.Option(help="Contexts of each synthetic task and length.")]
Questions = Annotated[int | None, typer.Option(help="Questions about each context.")]
Windows = Annotated[int | None, typer.Option(help="Windows of text for perplexity and agreement.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of each window.")]
Positions = Annotated[int | None, typer.Option(help="Tokens of the long window.")]
DecodeContext = Annotated[int | None, typer.Option(help="Tokens in the cache while decoding is timed.")]
Parts = Annotated[
    str | None,
    typer.Option(help="Only some of memory,agreement,positions,needle,tasks,lm-eval,generate,attend,serve."),
]
Calibration = Annotated[str, typer.Option(help="For +cal: a file from slimkv calibrate, auto, or none.")]
Text = Annotated[str, typer.Option(help="A file, a hub data set (name:config:split), or the shipped text.")]
Memory = Annotated[str | None, typer.Option(help="What tokens have to fit into, such as 40GiB.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]

_DEFAULT_MODEL = "smollm2-135m-instruct"
_SIZES = {
    "smoke": "Five caches and a little of everything, in minutes.",
    "quick": "Nine caches, paired by bytes, within an hour.",
    "full": "Every length the model allows, overnight.",
}


def _add(name: str, told: str) -> None:
    @app.command(name, help=told)
    def command(
        model: Model = _DEFAULT_MODEL,
        out: Out = None,
        formats: Formats = None,
        engine: Engine = "transformers",
        tasks: Tasks = None,
        task_folder: TaskFolder = None,
        limit: Limit = None,
        lengths: Lengths = None,
        contexts: Contexts = None,
        questions: Questions = None,
        windows: Windows = None,
        tokens: Tokens = None,
        positions: Positions = None,
        decode_context: DecodeContext = None,
        parts: Parts = None,
        calibration: Calibration = "auto",
        text: Text = "shipped",
        memory: Memory = None,
        device: Device = None,
        dtype: Dtype = None,
        threads: Threads = None,
        as_json: Json = False,
    ) -> None:
        with user_errors():
            from slimkv.lab.suite.settings import make_settings

            settings = make_settings(
                name, model, device=device, formats=_list(formats, str), engine=engine, tasks=_list(tasks, str),
                task_folder=str(task_folder) if task_folder is not None else None, limit=limit,
                lengths=_list(lengths, int), contexts=contexts, questions=questions, windows=windows,
                window_tokens=tokens, position_tokens=positions, decode_context=decode_context,
                parts=_list(parts, str), calibration=calibration, text=text, memory=memory, dtype=dtype,
            )  # fmt: skip
            _run(settings, out or Path(f"suite-{name}-{Path(model).name}"), threads, as_json)


for _name, _told in _SIZES.items():
    _add(_name, _told)


@app.command("compare")
def compare_runs(
    a: Annotated[Path, typer.Argument(help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(help="The folder of another.")],
    out: Annotated[Path | None, typer.Option(help="Write the comparison here, as Markdown.")] = None,
    as_json: Json = False,
) -> None:
    """Two runs side by side: what differs between them, and every figure that both have."""
    from rich.markdown import Markdown

    from slimkv.cli.output import emit
    from slimkv.lab.suite import compare
    from slimkv.lab.suite.written import read_results

    with user_errors():
        found = compare.compare(read_results(a), read_results(b), str(a), str(b))
        text = compare.as_markdown(found)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
    emit(compare.as_json(found), as_json, Markdown(text))


def _list(text: str | None, convert: Any) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(comma_list(text, convert))
    except ValueError as error:
        raise typer.BadParameter(f"cannot read {text!r}; write whole numbers with commas, as in 512,1024") from error


def _run(settings: Any, out: Path, threads: int | None, as_json: bool) -> None:
    import torch

    from slimkv.cli.output import emit
    from slimkv.lab.suite.runner import run_suite

    if threads is not None:
        torch.set_num_threads(threads)
    with Screen() as screen:
        results = run_suite(settings, out, screen)
    told = [] if as_json else [_table(results), f"report: {out / 'report.html'}"]
    emit(results["summary"] if as_json else results, as_json, *told)
    if results["failed"]:
        typer.echo(f"failed: {', '.join(results['failed'])}; see {out / 'parts'}", err=True)
        raise typer.Exit(1)


def _table(results: dict[str, Any]) -> Table:
    from rich.table import Table

    from slimkv.lab.suite.written import table_rows

    header, *rows = table_rows(results)
    table = Table(title=f"slimkv suite {results['suite']}: {results['model']}")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


class Screen:
    """Progress on standard error: a bar with an estimate, and a line for each finished part."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        from slimkv.cli.output import console

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
        """See ``slimkv.lab.suite.runner.Watcher``."""
        self.count = len(parts)
        for note in notes:
            self.console.print(note)

    def move(self, part: Part, what: str, share: float, seconds_left: float | None) -> None:
        """See ``slimkv.lab.suite.runner.Watcher``."""
        self.left = "" if seconds_left is None else f"about {_duration(seconds_left)} left"
        self.bar.update(self.task, description=what[:44], completed=share, left=self.left)

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """See ``slimkv.lab.suite.runner.Watcher``."""
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
