"""``slimkv demo`` on a real model: two caches answer side by side, then every format is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.evals.showcase import Showcase


def run(model: str, out: Path, answer_format: str, threads: int | None, as_json: bool) -> None:
    """Shows the answers as they come, then tables; writes ``report.html`` and ``report.json`` into ``out``."""
    from rich.live import Live

    from slimkv.cli.eval_model import load_quietly, progress_bar
    from slimkv.cli.output import console, emit
    from slimkv.evals.report import write_report
    from slimkv.evals.showcase import run_showcase

    screen = console(stderr=as_json)
    with screen.status(f"loading {model} (the first time it is fetched and converted, about a minute)"):
        loaded = load_quietly(model, threads)
    live = Live(console=screen, refresh_per_second=8, transient=False)
    with live, progress_bar(enter=False) as (start, progress):

        def advance(what: str, done: int, total: int) -> None:
            live.stop()  # the answers stay; the bar takes their place
            start()
            progress(what, done, total)

        showcase = run_showcase(
            loaded.model, loaded.tokenizer, name=model, answer_format=answer_format,
            shown=lambda stock, packed: live.update(_panels(stock, packed, answer_format)), progress=advance,
        )  # fmt: skip
    page, data = write_report(showcase, out)
    emit(showcase, as_json, *([] if as_json else [*_tables(showcase), f"report: {page} and {data}"]))


def _panels(stock: str, packed: str, format: str) -> Table:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(Panel(Text(stock.strip()), title="DynamicCache"), Panel(Text(packed.strip()), title=format))
    return grid


def _tables(showcase: Showcase) -> list[Table]:
    from rich.table import Table

    caches = Table(title=f"answering at {showcase.context_tokens} tokens of context")
    for name in ("cache", "bytes", "of bf16", "tokens/s"):
        caches.add_column(name, justify="left" if name == "cache" else "right")
    for a in showcase.answers:
        share = f"{a.cache_bytes / a.bf16_bytes:.3f}"
        caches.add_row(a.cache, f"{a.cache_bytes:,}", share, f"{a.tokens_per_second:.1f}")
    quality = showcase.quality
    title = f"{quality.mode}, {quality.windows} windows of {quality.window_tokens} tokens"
    formats = Table(title=f"{title}; plain perplexity {quality.raw_perplexity:.3f}")
    for name in ("format", "bytes/token", "smaller than bf16", "perplexity", "over plain", "same next token", "KL"):
        formats.add_column(name, justify="left" if name == "format" else "right")
    for r in quality.rows:
        size = f"{r.bytes_per_token:,.0f}", f"{quality.raw_bytes_per_token / r.bytes_per_token:.2f}x"
        formats.add_row(r.format, *size, f"{r.perplexity:.3f}", f"{r.over_raw:+.2%}", f"{r.top1:.1%}", f"{r.kl:.4f}")
    return [caches, formats]
