"""``slimkv eval perplexity | agreement | needle | generation | layers | widths | paths``: a format on a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimkv.cli.options import Json, comma_list, user_errors
from slimkv.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from slimkv.calibration import Calibration
    from slimkv.lab.evals.harness import Progress
    from slimkv.lab.models import Loaded

Model = Annotated[str, typer.Option(help="A packaged model, a folder, or a name on the Hugging Face hub.")]
Formats = Annotated[
    str,
    typer.Option("--format", help="Formats to measure: k4v4,k5v4; with a calibration also k4v4+cal, k4v4+cal+search4."),
]
Text = Annotated[str, typer.Option(help="A file, a hub data set (name:config:split), or the shipped text.")]
Offset = Annotated[int, typer.Option(help="Skip so many tokens of the text first.")]
Serving = Annotated[bool, typer.Option("--serving", help="Attend fresh chunks raw, as engines do; default: strict.")]
Plot = Annotated[Path | None, typer.Option(help="Write a PNG here.")]
Windows = Annotated[int, typer.Option(help="How many windows of the text.")]
Tokens = Annotated[int, typer.Option(help="Tokens per window.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]

CalibrationFile = Annotated[
    str | None, typer.Option("--calibration", help="A file from slimkv calibrate, or auto; default: none.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Attend every token through the codec.")]

_DEFAULT_MODEL = "smollm2-135m-instruct"


def add_to(app: typer.Typer) -> None:
    """Adds the commands to the ``eval`` group."""
    for command in (perplexity, agreement, positions, needle, generation, layers, widths, paths):
        app.command()(command)


@contextmanager
def progress_bar(enter: bool = True) -> Iterator[tuple[Callable[[], None], Progress]]:
    """A progress bar on standard error: what starts it (it runs at once with ``enter``), and what moves it on."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from slimkv.cli.output import console

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=console(stderr=True), transient=True)
    task = bar.add_task("loading the model")
    if enter:
        bar.start()
    try:
        yield bar.start, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
    finally:
        bar.stop()


def load_quietly(model: str, threads: int | None, device: str = "cpu") -> Loaded:
    """The model, without the progress bars of transformers, which would break the command's own."""
    import torch

    from slimkv.lab import models

    if threads is not None:
        torch.set_num_threads(threads)
    with user_errors():
        models.quiet_loading()
        return models.load(model, device=device)


def load_calibration(source: str | None, loaded: Loaded, progress: Progress) -> Calibration | None:
    """A calibration for the model from a file, or with ``auto`` the one that is made once and kept."""
    from slimkv.integrations.transformers.calibration.cached import AUTO, auto_calibration, find_calibration

    if source == AUTO:
        return auto_calibration(loaded.model, progress=progress)
    return find_calibration(source, loaded.model.config, None)


def _formats(given: str, calibration: str | None) -> list[str]:
    """The formats of ``--format``; raises before a model is loaded for nothing."""
    from slimkv.lab.evals.harness import check_formats

    names = comma_list(given, str)
    if not names:
        raise typer.BadParameter(f"--format {given!r} names no format; write k4v4 or k4v4,k5v4")
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
        from slimkv.lab.evals.texts import load_text, token_windows

        return token_windows(self.tokenizer, load_text(text), count, tokens, stride, offset)


@contextmanager
def _subject(
    model: str, threads: int | None, device: str, formats: str | None = None, calibration: str | None = None
) -> Iterator[_Subject]:
    """The frame of every command: a progress bar, errors in one line, and the model with its calibration."""
    with user_errors(), progress_bar() as (_, progress):
        names = _formats(formats, calibration) if formats is not None else []
        loaded = load_quietly(model, threads, device)
        known = load_calibration(calibration, loaded, progress)
        yield _Subject(loaded.model, loaded.tokenizer, names, known, progress)


def _show(report: Any, device: str, as_json: bool, table: Table) -> None:
    from slimkv.cli.output import emit
    from slimkv.lab.provenance import with_provenance

    emit(with_provenance(report, device), as_json, table)


def _mode(serving: bool) -> str:
    return "serving" if serving else "strict"


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def perplexity(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4,k6v6",
    text: Text = "shipped",
    windows: Windows = 4,
    tokens: Tokens = 1024,
    stride: Annotated[int | None, typer.Option(help="Tokens between window starts; default: no overlap.")] = None,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    serving: Serving = False,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a model whose cache is packed, against the stock cache."""
    from slimkv.lab.evals.model_plots import plot_quality
    from slimkv.lab.evals.perplexity import measure_perplexity

    with _subject(model, threads, device, formats, calibration) as subject:
        ids = subject.windows(text, windows, tokens, stride, offset)
        report = measure_perplexity(
            subject.model, ids, subject.formats, name=model, mode=_mode(serving), stride=stride,
            calibration=subject.calibration, progress=subject.progress,
        )  # fmt: skip
        if plot is not None:
            plot_quality(report.rows, plot)
    table = _table(f"perplexity, {report.mode}, {model}", "format", "perplexity", "over raw", "bytes/token")
    for row in report.rows:
        table.add_row(row.format, f"{row.perplexity:.4f}", f"{row.over_raw:+.2%}", f"{row.bytes_per_token:.0f}")
    _show(report, device, as_json, table)


def agreement(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4,k6v6",
    text: Text = "shipped",
    windows: Windows = 4,
    tokens: Tokens = 1024,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    serving: Serving = False,
    threads: Threads = None,
    device: Device = "cpu",
    prefill: Annotated[str, typer.Option(help="Arithmetic of long passes: auto, 16bit, 8bit, or 16bit,8bit.")] = "auto",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Top-1 agreement and KL divergence of predictions against the stock cache."""
    from slimkv.lab.evals.agreement import measure_agreement
    from slimkv.lab.evals.model_plots import plot_quality

    with _subject(model, threads, device, formats, calibration) as subject:
        ids = subject.windows(text, windows, tokens, offset=offset)
        report = measure_agreement(
            subject.model, ids, subject.formats, name=model, mode=_mode(serving), calibration=subject.calibration,
            progress=subject.progress, prefill=comma_list(prefill, str),
        )  # fmt: skip
        if plot is not None:
            plot_quality(report.rows, plot)
    title = f"against the stock cache, {report.mode}, {model}; raw perplexity {report.raw_perplexity:.4f}"
    table = _table(title, "format", "top-1", "KL", "KL 99%", "perplexity", "over raw", "bytes/token", "KL growth")
    for row in report.rows:
        numbers = f"{row.top1:.2%}", f"{row.kl:.5f}", f"{row.kl_99:.4f}", f"{row.perplexity:.4f}"
        growth = "" if row.kl_growth is None else f"{row.kl_growth:+.2%}"
        if row.kl_growth_error:
            growth += f" ± {row.kl_growth_error:.2%}"
        table.add_row(row.format, *numbers, f"{row.over_raw:+.2%}", f"{row.bytes_per_token:.0f}", growth)
    _show(report, device, as_json, table)


def positions(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4",
    text: Text = "shipped",
    windows: Windows = 1,
    tokens: Tokens = 8192,
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """KL divergence and agreement by position in long windows, every token read through the codec."""
    from slimkv.lab.evals.positions import measure_positions, plot_positions

    with _subject(model, threads, device, formats, calibration) as subject:
        ids = subject.windows(text, windows, tokens, offset=offset)
        report = measure_positions(
            subject.model, ids, subject.formats, name=model, calibration=subject.calibration, progress=subject.progress
        )
        if plot is not None:
            plot_positions(report, plot)
    ranges = [f"{a:,}-{b:,}" for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    table = _table(f"KL by position (top-1 agreement), strict, {model}", "format", *ranges, "mean")
    for row in report.rows:
        cells = (f"{kl:.4f} ({top1:.1%})" for kl, top1 in zip(row.kl, row.top1, strict=True))
        table.add_row(row.format, *cells, f"{row.mean_kl:.4f}")
    _show(report, device, as_json, table)


def needle(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4",
    text: Text = "shipped",
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "512,1024",
    depths: Annotated[str, typer.Option(help="Where the needle stands, 0 to 1.")] = "0.1,0.5,0.9",
    calibration: CalibrationFile = None,
    offset: Offset = 0,
    strict: Strict = False,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Needle in a haystack over depth and context."""
    from slimkv.lab.evals.model_plots import plot_needle
    from slimkv.lab.evals.needle import measure_needle
    from slimkv.lab.evals.texts import load_text

    with _subject(model, threads, device, formats, calibration) as subject:
        report = measure_needle(
            subject.model, subject.tokenizer, load_text(text), subject.formats, contexts=comma_list(contexts, int),
            depths=comma_list(depths, float), name=model, mode=_mode(not strict), progress=subject.progress,
            calibration=subject.calibration, offset=offset,
        )  # fmt: skip
        if plot is not None:
            plot_needle(report, plot)
    table = _table(f"needles found, {report.mode}, {model}", "format", "context", "depth", "found")
    for cell in report.cells:
        table.add_row(cell.format, str(cell.context), f"{cell.depth:.0%}", f"{cell.found}/{cell.tried}")
    _show(report, device, as_json, table)


def generation(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several. Default: four.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on every line.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64,
    calibration: CalibrationFile = None,
    strict: Strict = False,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Greedy text against the stock cache: where does it first differ?"""
    from slimkv.lab.evals.generation import PROMPTS, measure_generation
    from slimkv.lab.evals.model_plots import plot_generation

    with user_errors():
        asked = [*(prompt or []), *(_lines(prompts) if prompts is not None else [])] or list(PROMPTS)
    with _subject(model, threads, device, formats, calibration) as subject:
        report = measure_generation(
            subject.model, subject.tokenizer, subject.formats, prompts=asked, new_tokens=new_tokens, name=model,
            mode=_mode(not strict), progress=subject.progress, calibration=subject.calibration,
        )  # fmt: skip
        if plot is not None:
            plot_generation(report, plot)
    table = _table(f"greedy text, {report.mode}, {model}", "format", "prompt", "first difference", "same tokens")
    for row in report.rows:
        first = "none" if row.first_divergence is None else f"token {row.first_divergence} of {row.tokens}"
        table.add_row(row.format, row.prompt[:40], first, f"{row.same:.0%}")
    _show(report, device, as_json, table)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError(f"there is no file {path}; --prompts takes a text file with a prompt on every line")
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise InputError(f"{path} has no prompts; write one on every line")
    return found


def layers(
    model: Model = _DEFAULT_MODEL,
    formats: Formats = "k4v4,k6v6",
    text: Text = "shipped",
    tokens: Tokens = 512,
    offset: Offset = 0,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Attention error of every layer on its own queries, keys and values."""
    from slimkv.lab.evals.layers import measure_layers
    from slimkv.lab.evals.model_plots import plot_layers

    with _subject(model, threads, device, formats) as subject:
        ids = subject.windows(text, 1, tokens, offset=offset)
        report = measure_layers(subject.model, ids, subject.formats, name=model, progress=subject.progress)
        if plot is not None:
            plot_layers(report, plot)
    table = _table(f"relative error of attention output, {model}", "layer", *(row.format for row in report.rows))
    for number, errors in enumerate(zip(*(row.output for row in report.rows), strict=True)):
        table.add_row(str(number), *(f"{e:.4f}" for e in errors))
    _show(report, device, as_json, table)


def widths(
    calibration: Annotated[str, typer.Option(help="A file from slimkv calibrate.")],
    model: Model = _DEFAULT_MODEL,
    bits: Annotated[str, typer.Option(help="Widths to pack a layer in.")] = "3",
    text: Text = "shipped",
    windows: Windows = 1,
    tokens: Tokens = 512,
    offset: Offset = 0,
    threads: Threads = None,
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Predicted against measured KL divergence, with keys or values of one layer packed at a time."""
    from slimkv.cli.options import widths as parse_widths
    from slimkv.lab.evals.bit_allocation import measure_widths
    from slimkv.lab.evals.model_plots import plot_widths

    with _subject(model, threads, device, calibration=calibration) as subject:
        assert subject.calibration is not None
        ids = subject.windows(text, windows, tokens, offset=offset)
        report = measure_widths(
            subject.model, ids, subject.calibration, parse_widths(bits), name=model, progress=subject.progress
        )
        if plot is not None:
            plot_widths(report, plot)
    title = f"KL divergence by layer, {model}; correlation of logarithms {report.log_correlation:.2f}"
    table = _table(title, "layer", "side", "bits", "predicted", "measured")
    for row in report.rows:
        table.add_row(str(row.layer), row.side, str(row.bits), f"{row.predicted:.2e}", f"{row.kl:.2e}")
    _show(report, device, as_json, table)


def paths(
    model: Model = _DEFAULT_MODEL,
    format: Annotated[str, typer.Option("--format", help="The format of the cache.")] = "k4v4",
    text: Text = "shipped",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to start from.")] = 128,
    steps: Annotated[int, typer.Option(help="Greedy steps.")] = 200,
    offset: Offset = 0,
    independent: Annotated[bool, typer.Option("--independent", help="A cache for each path; default: one.")] = False,
    serving: Serving = False,
    threads: Threads = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Attention on pages against stock attention on decoded keys and values: logits and greedy tokens."""
    from slimkv.lab.evals.fused_vs_decoded import compare_paths

    with _subject(model, threads, device) as subject:
        ids = subject.windows(text, 1, tokens, offset=offset)
        report = compare_paths(
            subject.model, ids, format, steps=steps, name=model, mode=_mode(serving), independent=independent,
            progress=subject.progress,
        )  # fmt: skip
    table = _table(f"fused against decoded, {report.mode}, {model}, {format}", "what", "value")
    table.add_row("largest difference of logits", f"{report.largest_difference:.2e} of the largest logit")
    table.add_row("median difference", f"{report.median_difference:.2e}")
    table.add_row("steps that differ by more than 1e-3", f"{report.steps_beyond_1e3} of {report.steps}")
    same = (
        "the same in all steps" if report.first_different_token is None else f"differ at {report.first_different_token}"
    )
    table.add_row(f"greedy tokens over {report.steps} steps", same)
    table.add_row("attention calls on pages / decoded", f"{report.fused_calls} / {report.decoded_calls}")
    _show(report, device, as_json, table)
