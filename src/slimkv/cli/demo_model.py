"""``slimkv demo`` on a real model: several caches answer side by side, then every format is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from slimkv.lab.evals.questions import Question
    from slimkv.lab.evals.showcase import Showcase

_SHOWN = 2  # the stock cache and the best one; the page has all of them


def run(
    model: str, out: Path, best: str, calibration: str, threads: int | None, device: str, dtype: str, as_json: bool
) -> None:
    """Shows the answers as they come, then tables; writes ``report.html`` and ``report.json`` into ``out``."""
    from rich.live import Live

    from slimkv.cli.eval_model import check_calibration, load_calibration, load_quietly, progress_bar
    from slimkv.cli.output import console, emit
    from slimkv.lab.evals.harness import check_formats
    from slimkv.lab.evals.report import write_report
    from slimkv.lab.evals.showcase import run_showcase

    check_formats([best], calibrated=True)
    check_calibration(calibration)
    screen = console(stderr=as_json)
    with progress_bar() as (_, progress):
        loaded = load_quietly(model, threads, device, dtype, progress)
        known = load_calibration(calibration, loaded, progress)
    assert known is not None
    live = Live(console=screen, refresh_per_second=8, transient=False)
    with live, progress_bar(enter=False) as (start, progress):

        def advance(what: str, done: int, total: int) -> None:
            live.stop()  # the answers stay; the bar takes their place
            start()
            progress(what, done, total)

        showcase = run_showcase(
            loaded.model, loaded.tokenizer, known, name=model, best=best,
            shown=lambda question, texts: live.update(_panels(question, texts)), progress=advance,
        )  # fmt: skip
    page, data = write_report(showcase, out)
    emit(showcase, as_json, *([] if as_json else [*_tables(showcase), f"report: {page} and {data}"]))


def _panels(question: str, texts: Mapping[str, str]) -> Group:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    shown = list(texts.items())[:_SHOWN]
    for _ in shown:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(Text(text.strip()), title=name) for name, text in shown))
    return Group(Text(question, style="bold"), grid)


def _tables(showcase: Showcase) -> list[Table]:
    from rich.table import Table

    quality = showcase.quality
    title = f"{quality.mode}, {quality.windows} windows of {quality.window_tokens} tokens"
    formats = Table(title=f"{title}; plain perplexity {quality.raw_perplexity:.3f}")
    for name in ("cache", "bytes/token", "smaller than bf16", "perplexity", "over plain", "same next token", "KL"):
        formats.add_column(name, justify="left" if name == "cache" else "right")
    for r in quality.rows:
        size = f"{r.bytes_per_token:,.0f}", f"{quality.raw_bytes_per_token / r.bytes_per_token:.2f}x"
        formats.add_row(r.format, *size, f"{r.perplexity:.3f}", f"{r.over_raw:+.2%}", f"{r.top1:.1%}", f"{r.kl:.4f}")
    asked = [question for question in (showcase.short, showcase.long) if question is not None]
    return [*(_answers(question) for question in asked), formats]


def _answers(question: Question) -> Table:
    from rich.table import Table

    table = Table(title=f"{question.text} ({question.context_tokens:,} tokens of context)")
    for name in ("cache", "bytes", "of bf16", "tokens/s", "answer"):
        table.add_column(name, justify="right" if name in ("bytes", "of bf16", "tokens/s") else "left")
    for a in question.answers:
        numbers = f"{a.cache_bytes:,}", f"{a.cache_bytes / a.bf16_bytes:.3f}", f"{a.tokens_per_second:.1f}"
        table.add_row(a.cache, *numbers, " ".join(a.text.split())[:60])
    return table
