"""``slimkv demo``: a model answers with several caches side by side, then every format is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slimkv.cli.loading import check_caches, load_calibration, load_quietly, progress_bar
from slimkv.cli.options import DEFAULT_MODEL, Device, Dtype, Json, Model, Threads
from slimkv.cli.output import console, emit, make_table
from slimkv.cli.parsing import check_folder, option
from slimkv.config import AUTO
from slimkv.lab.demo.report import QUALITY, quality_rows, write_report
from slimkv.lab.demo.showcase import Question, Showcase, run_showcase

_SHOWN = 2  # the stock cache and the best one; the page has all of them


def demo(
    output: Annotated[Path, option("Folder for the report.", "--output", "-o", callback=check_folder)] = Path("out"),
    model: Model = DEFAULT_MODEL,
    format: Annotated[str, option("The packed cache shown beside the stock one.", "--format")] = "k4v4+cal",
    calibration: Annotated[str, option("A file from slimkv calibrate; auto: made once per model and kept.")] = AUTO,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Let a model answer with stock and packed caches side by side; write quality and bytes to report.html."""
    check_caches([format], calibration, keys=True)
    screen = console(stderr=as_json)
    with progress_bar() as progress:
        loaded = load_quietly(model, threads, device, dtype, progress)
        known = load_calibration(calibration, loaded, progress)
    assert known is not None
    live = Live(console=screen, refresh_per_second=8, transient=False)
    with live, progress_bar() as progress:

        def advance(what: str, done: int, total: int) -> None:
            live.stop()  # the answers stay on the screen, and the bar follows
            progress(what, done, total)

        showcase = run_showcase(
            loaded.model, loaded.tokenizer, known, name=model, best=format,
            shown=lambda question, texts: live.update(_panels(question, texts)), progress=advance,
        )  # fmt: skip
    page, data = write_report(showcase, output)
    emit(showcase, as_json, *([] if as_json else [*_tables(showcase), f"report: {page} and {data}"]))


def _panels(question: str, texts: Mapping[str, str]) -> Group:
    grid = Table.grid(expand=True)
    shown = list(texts.items())[:_SHOWN]
    for _ in shown:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(Text(text.strip()), title=Text(name)) for name, text in shown))
    return Group(Text(question, style="bold"), grid)


def _tables(showcase: Showcase) -> list[Table]:
    quality = showcase.quality
    title = f"{quality.mode}, {quality.windows} windows of {quality.window_tokens} tokens"
    title = f"{title}; plain perplexity {quality.raw_perplexity:.3f}"
    formats = make_table(title, *QUALITY, rows=quality_rows(quality))
    asked = [question for question in (showcase.short, showcase.long) if question is not None]
    return [*(_answers(question) for question in asked), formats]


def _answers(question: Question) -> Table:
    title = f"{question.text} ({question.context_tokens:,} tokens of context)"
    table = make_table(title, "cache", "answer", "bytes", "of bf16", "tokens/s", left=2)
    for a in question.answers:
        numbers = f"{a.cache_bytes:,}", f"{a.cache_bytes / a.bf16_bytes:.3f}", f"{a.tokens_per_second:.1f}"
        table.add_row(a.cache, " ".join(a.text.split())[:60], *numbers)
    return table
