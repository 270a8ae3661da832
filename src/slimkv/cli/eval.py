"""``slimkv eval``: the quality of a format on a real model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from torch import Tensor

from slimkv.cli.loading import check_caches, load_calibration, load_quietly, progress_bar
from slimkv.cli.options import DEFAULT_MODEL, CalibrationFile, Device, Dtype, Json, Model, Output, Plot, Text, Threads
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import comma_list, command_like, count, numbers, option, option_parameters
from slimkv.config import AUTO, KVCacheConfig
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.generation import PROMPTS, measure_generation
from slimkv.lab.evals.harness import RAW, check_model
from slimkv.lab.evals.needle import measure_needle
from slimkv.lab.evals.positions import measure_positions
from slimkv.lab.evals.scores import measure_scores
from slimkv.lab.evals.statistics import wilson
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.lab.provenance import provenance
from slimkv.lab.report.page import Plot as Drawing
from slimkv.lab.report.plots import position_plots, quality_plot, write_plots

app = typer.Typer(name="eval", help="Measure the quality loss of a format.", no_args_is_help=True)
Formats = Annotated[str, option("Formats: k4v4,k5v4; k4v4+cal with a calibration; c4 of latents (MLA).", "--format")]
Offset = Annotated[int, count("Skip this many tokens of the text.", 0)]
Serving = Annotated[bool, option("New chunks attend to one another unquantized; default: strict.", "--serving")]
Windows = Annotated[int, count("Number of windows of the text.")]
Tokens = Annotated[int, count("Tokens per window.", 2)]
Strict = Annotated[bool, option("Read every token through the codec.", "--strict")]
Result = tuple[Any, list[Any], list[Drawing]]  # a report, its renderables, its plots


@dataclass(frozen=True)
class Subject:
    """The loaded model, tokenizer and calibration of a command."""

    model: Any
    tokenizer: Any
    text: str
    formats: list[str]
    options: dict[str, Any]  # arguments of every eval: ``harness.Common``

    def windows(self, count: int, tokens: int, offset: int = 0) -> Tensor:
        """Windows of the text, int64 [count, tokens]."""
        return token_windows(self.tokenizer, self.text, count, tokens, offset)


def _command(formats: str, *, text: bool = True, plot: bool = False) -> Callable[[Callable[..., Result]], Any]:
    """Turns a measurement into a command: adds shared options, loads model and calibration, prints the result.

    ``formats``: the default of ``--format``. ``text``, ``plot``: whether the command has these options.
    """

    def decorate(measure: Callable[..., Result]) -> Any:
        def command(**given: Any) -> None:
            own = {name: given[name] for name in options}
            read = load_text(given["text"]) if text else ""
            with progress_bar() as progress:
                formats, calibration = comma_list("--format", given["formats"]), given["calibration"]
                name = measure.__name__
                check_caches(formats, calibration, budgets=name == "positions", keys=name == "scores")
                loaded = load_quietly(given["model"], given["threads"], given["device"], given["dtype"], progress)
                check_model(loaded.model, formats)
                known = load_calibration(calibration, loaded, progress)
                common = {"name": given["model"], "calibration": known, "progress": progress}
                report, shown, plots = measure(Subject(loaded.model, loaded.tokenizer, read, formats, common), **own)
            result = {**asdict(report), "run": asdict(provenance(given["device"]))}
            emit(result, given["as_json"], *shown, output=given["output"])
            if plot and given["plot"] is not None:
                write_plots(f"{measure.__name__} of {given['model']}", [svg for _, _, svg in plots], given["plot"])

        _, *found = inspect.signature(measure, eval_str=True).parameters.values()
        options = [parameter.name for parameter in found]
        before = {"model": (Model, DEFAULT_MODEL), "formats": (Formats, formats)}
        before |= {"text": (Text, "shipped")} if text else {}
        after: dict[str, Any] = {"calibration": (CalibrationFile, None), "threads": (Threads, None)}
        after |= {"device": (Device, AUTO), "dtype": (Dtype, "float32")}
        after |= {"plot": (Plot, None)} if plot else {}
        after |= {"output": (Output, None), "as_json": (Json, False)}
        return app.command()(
            command_like(measure, command, [*option_parameters(before), *found, *option_parameters(after)])
        )

    return decorate


def _check_prefill(given: str) -> str:
    for way in comma_list("--prefill", given):
        KVCacheConfig(prefill=way)  # raises and lists the known values
    return given


@_command("k4v4,k6v6", plot=True)
def agreement(
    subject: Subject,
    windows: Windows = 4,
    tokens: Tokens = 1024,
    offset: Offset = 0,
    serving: Serving = False,
    prefill: Annotated[
        str, option("Arithmetic of long passes: auto, 16bit, 8bit, or 16bit,8bit.", callback=_check_prefill)
    ] = "auto",
) -> Result:
    """Measure perplexity, KL divergence and top-1 agreement of predictions, compared with the stock cache."""
    ids = subject.windows(windows, tokens, offset)
    report = measure_agreement(
        subject.model, ids, subject.formats, mode="serving" if serving else "strict",
        prefill=comma_list("--prefill", prefill), **subject.options,
    )  # fmt: skip
    title = f"against the stock cache, {report.mode}, {report.model}; raw perplexity {report.raw_perplexity:.4f}"
    table = make_table(title, "format", "top-1", "KL", "KL 99%", "perplexity", "over raw", "bytes/token", "KL growth")
    for row in report.rows:
        kl = f"{row.kl:.5f} ± {max(row.kl_high - row.kl, row.kl - row.kl_low):.5f}"  # the interval's larger side
        half = max(row.over_raw_high - row.over_raw, row.over_raw - row.over_raw_low)
        over_raw = f"{row.over_raw:+.2%}" + (f" ± {half:.2%}" if half else "")
        numbers = f"{row.top1:.2%}", kl, f"{row.kl_99:.4f}", f"{row.perplexity:.4f}"
        growth = "" if row.kl_growth is None else f"{row.kl_growth:+.2%}"
        if row.kl_growth_error:
            growth += f" ± {row.kl_growth_error:.2%}"
        table.add_row(row.format, *numbers, over_raw, f"{row.bytes_per_token:.0f}", growth)
    return report, [table], [quality_plot([(row.format, row.bytes_per_token, row.kl) for row in report.rows])]


@_command("k4v4")
def scores(subject: Subject, tokens: Tokens = 512) -> Result:
    """Measure the noise of attention scores by layer, as the engines' fidelity guard does."""
    report = measure_scores(subject.model, subject.windows(1, tokens), subject.formats, **subject.options)
    return report, [score_table(report)], []


def score_table(report: Any) -> Any:
    """A ``ScoreReport`` as a table: one row per layer, one column per format."""
    title = f"noise of scores in nats, {report.model}; engines stop beyond {report.limit:g}"
    table = make_table(title, "layer", *(row.format for row in report.rows))
    for layer in sorted({number for row in report.rows for number in row.layers}):
        table.add_row(str(layer), *(f"{row.layers[layer]:.3f}" if layer in row.layers else "-" for row in report.rows))
    return table


@_command("k4v4", plot=True)
def positions(subject: Subject, windows: Windows = 1, tokens: Tokens = 8192, offset: Offset = 0) -> Result:
    """Measure KL divergence and top-1 agreement by position in long windows.

    A format may be a memory budget: memory=90MiB, memory=50% (of bfloat16), or memory=k4v4 (as much as k4v4 takes).
    """
    ids = subject.windows(windows, tokens, offset)
    report = measure_positions(subject.model, ids, subject.formats, **subject.options)
    ranges = [f"{a:,}-{b:,}" for a, b in zip((0, *report.edges[:-1]), report.edges, strict=True)]
    table = make_table(f"KL by position (top-1 agreement), strict, {report.model}", "format", *ranges, "mean", "MiB")
    for row in report.rows:
        cells = (f"{kl:.3g} ({top1:.1%})" for kl, top1 in zip(row.kl, row.top1, strict=True))
        table.add_row(row.format, *cells, f"{row.mean_kl:.3g}", f"{row.bytes[-1] / 2**20:.1f}")
    return report, [table], position_plots(report.edges, [(row.format, row.kl, row.bytes) for row in report.rows])


@_command("k4v4")
def needle(
    subject: Subject,
    contexts: Annotated[str, numbers("Context lengths in tokens.", int, 64)] = "512,1024",
    depths: Annotated[str, numbers("Depths of the needle, 0 to 1.", float, 0, 1)] = "0.1,0.5,0.9",
    offset: Offset = 0,
    strict: Strict = False,
) -> Result:
    """Measure needle retrieval over depth and context length."""
    report = measure_needle(
        subject.model, subject.tokenizer, subject.text, subject.formats, offset=offset,
        contexts=comma_list("--contexts", contexts, int), depths=comma_list("--depths", depths, float),
        mode="strict" if strict else "serving", **subject.options,
    )  # fmt: skip
    table = make_table(f"needles found, {report.mode}, {report.model}", "format", "context", "depth", "found")
    for cell in report.cells:
        table.add_row(cell.format, str(cell.context), f"{cell.depth:.0%}", f"{cell.found}/{cell.tried}")
    for format in dict.fromkeys(cell.format for cell in report.cells):
        mine = [cell for cell in report.cells if cell.format == format]
        found, tried = sum(cell.found for cell in mine), sum(cell.tried for cell in mine)
        interval = wilson(found, tried)
        table.add_row(format, "all", "all", f"{found}/{tried}, 95%: {interval.low:.0%} to {interval.high:.0%}")
    return report, [table], []


@_command("k4v4", text=False)
def generation(
    subject: Subject,
    prompt: Annotated[list[str] | None, option("A prompt; repeat for more. Default: four prompts.")] = None,
    new_tokens: Annotated[int, count("Tokens to generate per prompt.")] = 64,
    strict: Strict = False,
) -> Result:
    """Find the first token of greedy text that differs from the stock cache's."""
    asked = prompt or list(PROMPTS)
    report = measure_generation(
        subject.model, subject.tokenizer, subject.formats, prompts=asked, new_tokens=new_tokens,
        mode="strict" if strict else "serving", **subject.options,
    )  # fmt: skip
    title = f"greedy text, {report.mode}, {report.model}"
    table = make_table(title, "format", "prompt", "first difference", "same tokens")
    for row in report.rows:
        first = "none" if row.first_divergence is None else f"token {row.first_divergence} of {row.tokens}"
        table.add_row(row.format, row.prompt[:40], first, f"{row.same:.0%}")
    texts = make_table("texts", "cache", "text", left=2)
    for asked_for, raw in zip(asked, report.raw_texts, strict=True):
        texts.add_section()
        texts.add_row("prompt", asked_for)
        texts.add_row(RAW, raw)
        for row in report.rows:
            if row.prompt == asked_for:
                texts.add_row(row.format, row.text)
    return report, [table, texts], []
