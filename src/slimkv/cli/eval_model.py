"""``slimkv eval perplexity | agreement | positions | needle | generation``: a format on a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimkv.cli.options import (
    AUTO,
    DEFAULT_MODEL,
    CalibrationFile,
    Device,
    Dtype,
    Json,
    Model,
    Output,
    Plot,
    Text,
    Threads,
    at_least,
    comma_list,
    numbers,
)
from slimkv.cli.output import make_table
from slimkv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from slimkv.calibration import Calibration
    from slimkv.lab.evals.harness import Progress
    from slimkv.lab.models import Loaded

Formats = Annotated[
    str, typer.Option("--format", help="Formats to measure, such as k4v4,k5v4; with a calibration also k4v4+cal.")
]
Offset = Annotated[int, typer.Option(help="Skip this many tokens of the text.", callback=at_least(0))]
Serving = Annotated[
    bool, typer.Option("--serving", help="Attend new chunks unquantized, as engines do; default: strict.")
]
Windows = Annotated[int, typer.Option(help="Number of windows of the text.", callback=at_least(1))]
Tokens = Annotated[int, typer.Option(help="Tokens per window.", callback=at_least(2))]
Strict = Annotated[bool, typer.Option("--strict", help="Read every token through the codec.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands to the ``eval`` group."""
    for command in (perplexity, agreement, positions, scores, needle, generation):
        app.command()(command)


@contextmanager
def progress_bar(enter: bool = True) -> Iterator[tuple[Callable[[], None], Progress]]:
    """A progress bar on standard error: what starts it (it runs at once with ``enter``), and what moves it on."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from slimkv.cli.output import console

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda: None, _lines_of_progress()
        return
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=screen, transient=True)
    task = bar.add_task("loading the model")
    if enter:
        bar.start()
    try:
        yield bar.start, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
    finally:
        bar.stop()


def _lines_of_progress() -> Progress:
    """Progress where there is no terminal: a line for each thing that is begun after the first."""
    last = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if done and what != last:
            last = what
            typer.echo(f"[{done}/{total}] {what}", err=True)

    return tell


def load_quietly(model: str, threads: int | None, device: str, dtype: str, progress: Progress) -> Loaded:
    """The model, without the progress bars of transformers, which would break the command's own."""
    import torch

    from slimkv.lab import models

    if threads is not None:
        torch.set_num_threads(threads)
    models.quiet_loading()
    return models.load(model, models.parse_dtype(dtype), device, progress)


def load_calibration(source: str | None, loaded: Loaded, progress: Progress) -> Calibration | None:
    """A calibration for the model from a file, or with ``auto`` the one that is made once and kept."""
    from slimkv.integrations.transformers.calibration.cached import AUTO, auto_calibration, find_calibration

    if source == AUTO:
        return auto_calibration(loaded.model, progress=progress)
    return find_calibration(source, loaded.model.config, None)


def check_calibration(source: str | None) -> None:
    """Raises before a model is loaded for a calibration that does not exist."""
    if source not in (None, AUTO) and not Path(source).is_file():
        raise InputError(f"there is no calibration file {source}; make one with slimkv calibrate, or use auto")


def _formats(given: str, calibration: str | None) -> list[str]:
    """The formats of ``--format``; raises before a model is loaded for nothing."""
    from slimkv.lab.evals.harness import check_formats

    names = comma_list(given, str)
    if not names:
        raise InputError(f"--format {given!r} names no format; write k4v4 or k4v4,k5v4")
    check_formats(names, calibration is not None)
    return names


@dataclass(frozen=True)
class _Subject:
    """What a command measures, loaded."""

    model: Any
    tokenizer: Any
    formats: list[str]
    calibration: Calibration | None
    progress: Progress

    def windows(self, text: str, count: int, tokens: int, stride: int | None = None, offset: int = 0) -> Tensor:
        """Windows of a text, int64 [count, tokens]."""
        from slimkv.lab.evals.texts import token_windows

        return token_windows(self.tokenizer, text, count, tokens, stride, offset)


@contextmanager
def _subject(
    model: str, threads: int | None, device: str, dtype: str, formats: str, calibration: str | None
) -> Iterator[_Subject]:
    """The frame of every command: a progress bar, and the model with its calibration."""
    with progress_bar() as (_, progress):
        names = _formats(formats, calibration)
        check_calibration(calibration)
        loaded = load_quietly(model, threads, device, dtype, progress)
        known = load_calibration(calibration, loaded, progress)
        yield _Subject(loaded.model, loaded.tokenizer, names, known, progress)


def _show(report: Any, device: str, as_json: bool, output: Path | None, *shown: Any) -> None:
    from slimkv.cli.output import emit
    from slimkv.lab.provenance import with_provenance

    emit(with_provenance(report, device), as_json, *shown, output=output)


def _mode(serving: bool) -> str:
    return "serving" if serving else "strict"


def perplexity(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4,k6v6",
    text: Text = "shipped",
    windows: Windows = 4,
    tokens: Tokens = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between window starts; default: no overlap.", callback=at_least(1))
    ] = None,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    serving: Serving = False,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Perplexity with a packed cache, compared with the stock cache."""
    from slimkv.lab.evals.model_plots import plot_quality
    from slimkv.lab.evals.perplexity import measure_perplexity
    from slimkv.lab.evals.texts import load_text

    read = load_text(text)
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        ids = subject.windows(read, windows, tokens, stride, offset)
        report = measure_perplexity(
            subject.model, ids, subject.formats, name=model, mode=_mode(serving), stride=stride,
            calibration=subject.calibration, progress=subject.progress,
        )  # fmt: skip
        if plot is not None:
            plot_quality(report.rows, plot)
    table = make_table(f"perplexity, {report.mode}, {model}", "format", "perplexity", "over raw", "bytes/token")
    for row in report.rows:
        table.add_row(row.format, f"{row.perplexity:.4f}", f"{row.over_raw:+.2%}", f"{row.bytes_per_token:.0f}")
    _show(report, device, as_json, output, table)


def agreement(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4,k6v6",
    text: Text = "shipped",
    windows: Windows = 4,
    tokens: Tokens = 1024,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    serving: Serving = False,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    prefill: Annotated[str, typer.Option(help="Arithmetic of long passes: auto, 16bit, 8bit, or 16bit,8bit.")] = "auto",
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """KL divergence and top-1 agreement of predictions, compared with the stock cache."""
    from slimkv.config import KVCacheConfig
    from slimkv.lab.evals.agreement import measure_agreement
    from slimkv.lab.evals.model_plots import plot_quality
    from slimkv.lab.evals.texts import load_text

    read, ways = load_text(text), comma_list(prefill, str)
    for way in ways:
        KVCacheConfig(prefill=way)  # raises with the known values
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        ids = subject.windows(read, windows, tokens, offset=offset)
        report = measure_agreement(
            subject.model, ids, subject.formats, name=model, mode=_mode(serving), calibration=subject.calibration,
            progress=subject.progress, prefill=ways,
        )  # fmt: skip
        if plot is not None:
            plot_quality(report.rows, plot)
    title = f"against the stock cache, {report.mode}, {model}; raw perplexity {report.raw_perplexity:.4f}"
    table = make_table(title, "format", "top-1", "KL", "KL 99%", "perplexity", "over raw", "bytes/token", "KL growth")
    for row in report.rows:
        numbers = f"{row.top1:.2%}", f"{row.kl:.5f}", f"{row.kl_99:.4f}", f"{row.perplexity:.4f}"
        growth = "" if row.kl_growth is None else f"{row.kl_growth:+.2%}"
        if row.kl_growth_error:
            growth += f" ± {row.kl_growth_error:.2%}"
        table.add_row(row.format, *numbers, f"{row.over_raw:+.2%}", f"{row.bytes_per_token:.0f}", growth)
    _show(report, device, as_json, output, table)


def scores(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4",
    text: Text = "shipped",
    tokens: Tokens = 512,
    calibration: CalibrationFile = None,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Noise that quantised keys add to attention scores, by layer: what the fidelity guard of engines measures."""
    from slimkv.lab.evals.scores import measure_scores
    from slimkv.lab.evals.texts import load_text

    read = load_text(text)
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        ids = subject.windows(read, 1, tokens)
        report = measure_scores(
            subject.model, ids, subject.formats, name=model, calibration=subject.calibration, progress=subject.progress
        )
    _show(report, device, as_json, output, score_table(report))


def score_table(report: Any) -> Any:
    """The figures of a ``ScoreReport``: a row for each layer, a column for each format."""
    title = f"noise of scores in nats, {report.model}; engines stop beyond {report.limit:g}"
    table = make_table(title, "layer", *(row.format for row in report.rows))
    for layer in sorted({number for row in report.rows for number in row.layers}):
        table.add_row(str(layer), *(f"{row.layers[layer]:.3f}" if layer in row.layers else "-" for row in report.rows))
    return table


def positions(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4",
    text: Text = "shipped",
    windows: Windows = 1,
    tokens: Tokens = 8192,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """KL divergence and top-1 agreement by position in long windows (strict)."""
    from slimkv.lab.evals.positions import measure_positions, plot_positions
    from slimkv.lab.evals.texts import load_text

    read = load_text(text)
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        ids = subject.windows(read, windows, tokens, offset=offset)
        report = measure_positions(
            subject.model, ids, subject.formats, name=model, calibration=subject.calibration, progress=subject.progress
        )
        if plot is not None:
            plot_positions(report, plot)
    ranges = [f"{a:,}-{b:,}" for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    table = make_table(f"KL by position (top-1 agreement), strict, {model}", "format", *ranges, "mean")
    for row in report.rows:
        cells = (f"{kl:.4f} ({top1:.1%})" for kl, top1 in zip(row.kl, row.top1, strict=True))
        table.add_row(row.format, *cells, f"{row.mean_kl:.4f}")
    _show(report, device, as_json, output, table)


def needle(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4",
    text: Text = "shipped",
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens, such as 512,1024.")] = "512,1024",
    depths: Annotated[str, typer.Option(help="Depths of the needle in the text, 0 to 1.")] = "0.1,0.5,0.9",
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    strict: Strict = False,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Needle in a haystack, over depth and context length."""
    from slimkv.lab.evals.model_plots import plot_needle
    from slimkv.lab.evals.needle import measure_needle
    from slimkv.lab.evals.texts import load_text

    lengths, places = numbers("--contexts", contexts, int), numbers("--depths", depths, float)
    read = load_text(text)
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        report = measure_needle(
            subject.model, subject.tokenizer, read, subject.formats, contexts=lengths,
            depths=places, name=model, mode=_mode(not strict), progress=subject.progress,
            calibration=subject.calibration, offset=offset,
        )  # fmt: skip
        if plot is not None:
            plot_needle(report, plot)
    table = make_table(f"needles found, {report.mode}, {model}", "format", "context", "depth", "found")
    for cell in report.cells:
        table.add_row(cell.format, str(cell.context), f"{cell.depth:.0%}", f"{cell.found}/{cell.tried}")
    _show(report, device, as_json, output, table)


def generation(
    model: Model = DEFAULT_MODEL,
    formats: Formats = "k4v4",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for more. Default: four prompts.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", callback=at_least(1))] = 64,
    calibration: CalibrationFile = None,
    strict: Strict = False,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Where greedy text first differs from that of the stock cache."""
    from rich.markup import escape

    from slimkv.lab.evals.generation import PROMPTS, measure_generation
    from slimkv.lab.evals.harness import RAW
    from slimkv.lab.evals.model_plots import plot_generation

    asked = [*(prompt or []), *(_lines(prompts) if prompts is not None else [])] or list(PROMPTS)
    with _subject(model, threads, device, dtype, formats, calibration) as subject:
        report = measure_generation(
            subject.model, subject.tokenizer, subject.formats, prompts=asked, new_tokens=new_tokens, name=model,
            mode=_mode(not strict), progress=subject.progress, calibration=subject.calibration,
        )  # fmt: skip
        if plot is not None:
            plot_generation(report, plot)
    table = make_table(f"greedy text, {report.mode}, {model}", "format", "prompt", "first difference", "same tokens")
    for row in report.rows:
        first = "none" if row.first_divergence is None else f"token {row.first_divergence} of {row.tokens}"
        table.add_row(row.format, row.prompt[:40], first, f"{row.same:.0%}")
    texts = make_table("texts", "cache", "text", left=2)
    for asked_for, raw in zip(asked, report.raw_texts, strict=True):
        texts.add_section()
        texts.add_row("prompt", escape(asked_for))
        texts.add_row(RAW, escape(raw))
        for row in report.rows:
            if row.prompt == asked_for:
                texts.add_row(row.format, escape(row.text))
    _show(report, device, as_json, output, table, texts)


def _lines(path: Path) -> list[str]:
    from slimkv.lab.evals.texts import load_text

    if not path.is_file():
        raise InputError(f"there is no file {path}; --prompts takes a text file with one prompt per line")
    found = [line for line in load_text(str(path)).splitlines() if line.strip()]
    if not found:
        raise InputError(f"{path} has no prompts; write one per line")
    return found
