"""``report.html`` and ``report.json`` of the demonstration."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path

from slimkv.lab.demo.showcase import Answer, Question, Showcase
from slimkv.lab.evals.agreement import AgreementReport
from slimkv.lab.report.charts import Axis, Series, chart
from slimkv.lab.report.page import Plot, document, plot_cards, table, td, tile, tr, versions_line
from slimkv.lab.report.plots import quality_plot


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _answer(answer: Answer, stock: Answer) -> str:
    if answer is stock:
        same = "the stock cache"
    elif answer.first_difference is None:
        same = "identical to the stock cache's answer"
    else:
        same = f"differs from the stock cache's answer from token {answer.first_difference + 1} on"
    speed = f"{answer.tokens} tokens at {answer.tokens_per_second:.1f} tokens/s"
    detail = f"{_size(answer.cache_bytes)} of cache ({_size(answer.bf16_bytes)} in bfloat16); {speed}; {same}"
    return (
        f'<div class="card"><h3>{escape(answer.cache)}</h3><p>{escape(answer.text.strip())}</p>'
        f'<p class="sub small">{escape(detail)}</p></div>'
    )


def _question(title: str, question: Question, note: str) -> str:
    answers = "".join(_answer(answer, question.answers[0]) for answer in question.answers)
    asked = f"\N{LEFT DOUBLE QUOTATION MARK}{question.text}\N{RIGHT DOUBLE QUOTATION MARK} {note}"
    return f'<h2>{escape(title)}</h2><p class="sub">{escape(asked)}</p><div class="pair">{answers}</div>'


def _plots(showcase: Showcase) -> list[Plot]:
    curves = [Series(name, showcase.contexts, [b / 2**20 for b in held]) for name, held in showcase.memory.items()]
    memory = chart("Memory by length", Axis("tokens of one sequence"), Axis("cache, MiB"), curves)
    return [
        quality_plot([(r.format, r.bytes_per_token, r.kl) for r in showcase.quality.rows]),
        ("Memory by length", "Bytes that one sequence allocates, including scales and page padding.", memory),
    ]


def _tiles(showcase: Showcase) -> str:
    rows = {r.format: r for r in showcase.quality.rows}
    best = rows[showcase.best]
    tiles = [
        tile(
            f"{showcase.quality.raw_bytes_per_token / best.bytes_per_token:.2f}x smaller",
            f"{best.format}: {best.bytes_per_token:,.0f} bytes per token; bfloat16: "
            f"{showcase.quality.raw_bytes_per_token:,.0f}",
        )
    ]
    for other in ("k4v4", "turboquant_4bit_nc"):
        if other in rows and other != best.format and best.kl > 0:
            note = f"KL divergence of {best.format} relative to {other} ({rows[other].bytes_per_token:,.0f} bytes)"
            tiles.append(tile(f"{best.kl / rows[other].kl:.2f}x", note))
    tiles.append(tile(f"{best.top1:.1%}", f"same next token as the stock cache ({showcase.quality.mode})"))
    return "".join(tiles)


QUALITY = ("cache", "bytes per token", "smaller than bf16", "perplexity", "over stock", "same next token", "KL")


def quality_rows(quality: AgreementReport) -> list[list[str]]:
    """The columns ``QUALITY`` of every format."""
    return [
        [r.format, f"{r.bytes_per_token:,.0f}", f"{quality.raw_bytes_per_token / r.bytes_per_token:.2f}x",
         f"{r.perplexity:.3f}", f"{r.over_raw:+.2%}", f"{r.top1:.1%}", f"{r.kl:.4f}"]
        for r in quality.rows
    ]  # fmt: skip


def _quality_table(quality: AgreementReport) -> str:
    stock = ["bf16", f"{quality.raw_bytes_per_token:,.0f}", "1.00x", f"{quality.raw_perplexity:.3f}", "", "", ""]
    note = (
        f"{quality.mode}: attention reads every key and value through the codec; {quality.windows} windows of "
        f"{quality.window_tokens} tokens. +cal: keys are rounded with the model's calibration."
    )
    rows = [tr(td(cell) for cell in row) for row in (stock, *quality_rows(quality))]
    return table(QUALITY, rows, "quality", note=note)


def html(showcase: Showcase) -> str:
    """One self-contained page."""
    run = showcase.run
    versions = versions_line(run.versions)
    questions = ""
    if showcase.long is not None:
        note = f"The answer appears once, in the middle of {showcase.long.context_tokens:,} tokens."
        questions += _question("A question about a long text", showcase.long, note)
    questions += _question("A short question", showcase.short, f"({showcase.short.context_tokens} tokens)")
    body = f"""<h1>slimkv on {escape(showcase.model)}</h1>
<div class="sub">{escape(run.device)}, {run.cpu_threads} threads, {escape(run.date)}</div>
<div class="tiles">{_tiles(showcase)}</div>
{plot_cards(_plots(showcase))}
<h2>Quality and cost of each cache</h2>
{_quality_table(showcase.quality)}
{questions}
<footer>Calibrated on {escape(showcase.calibration)}. Command: {escape(run.command)}. {escape(versions)}.
{showcase.seconds:.0f} seconds.</footer>"""
    return document(f"slimkv on {showcase.model}", body)


def write_report(showcase: Showcase, folder: Path) -> tuple[Path, Path]:
    """Writes ``report.html`` and ``report.json``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.html", folder / "report.json"
    page.write_text(html(showcase), encoding="utf-8")
    data.write_text(json.dumps(asdict(showcase), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return page, data
