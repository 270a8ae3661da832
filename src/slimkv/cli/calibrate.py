"""``slimkv calibrate``: writes a model's query statistics to a file, and chooses widths per layer for a budget."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slimkv.calibration import Calibration
from slimkv.calibration.bit_allocation import Solution, choose_widths, chooses_widths
from slimkv.calibration.cache import cached_path
from slimkv.calibration.predict import logit_noise
from slimkv.cli.loading import load_quietly, progress_bar
from slimkv.cli.options import Device, Dtype, Json, ModelArgument, Threads
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import check_file, choice, count, given, option
from slimkv.config import AUTO
from slimkv.errors import InputError
from slimkv.lab import models
from slimkv.lab.engine_process import require_engine
from slimkv.lab.evals.harness import Stopwatch
from slimkv.lab.evals.texts import load_text, token_windows

SAMPLED, RANDOM = "sampled", "random"
IDS = (SAMPLED, RANDOM)
TRANSFORMERS, SERVING = "transformers", {"vllm": "vLLM", "sglang": "SGLang"}
ENGINES = (TRANSFORMERS, *SERVING)


def calibrate(
    context: typer.Context,
    model: ModelArgument,
    output: Annotated[
        Path | None,
        option("File to write; default: the one that calibration='auto' reads.", "--output", "-o", callback=check_file),
    ] = None,
    ids: Annotated[str, choice("Token ids to calibrate on", *IDS)] = SAMPLED,
    text: Annotated[str | None, option("Calibrate on a text (file, hub data set, shipped) instead of --ids.")] = None,
    windows: Annotated[int, count("Number of windows to calibrate on.")] = 8,
    tokens: Annotated[int, count("Tokens per window.", 2)] = 1024,
    seed: Annotated[int, count("Seed of the sampled or random token ids.", 0)] = 0,
    budget: Annotated[float | None, option("Choose each layer's width: average bits per value, with scales.")] = None,
    profile: Annotated[str | None, option("Choose each layer's width: lossless, balanced or aggressive.")] = None,
    max_positions: Annotated[int | None, count("Longest context to calibrate for; default: the model's own.")] = None,
    engine: Annotated[str, choice("Engine that runs the model", *ENGINES)] = TRANSFORMERS,
    engine_options: Annotated[str | None, option("Engine options in JSON, as '{\"tensor_parallel_size\": 4}'.")] = None,
    threads: Threads = None,
    device: Device = AUTO,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Run a model once and write the query statistics that query-aware rounding needs."""
    chooses = chooses_widths(budget, profile)
    if engine in SERVING and given(context, "text", "ids", "budget", "profile"):
        raise InputError(
            f"--text, --ids, --budget and --profile need --engine transformers: {SERVING[engine]} calibrates on tokens "
            "sampled from the model and does not measure the cost of quantization noise"
        )
    if engine in SERVING and (unused := given(context, "threads", "device", "dtype")):
        raise InputError(f"{SERVING[engine]} does not take {', '.join(unused)}: use its own --engine-options")
    if engine_options is not None and engine not in SERVING:
        raise InputError(f"--engine-options are for --engine {' and '.join(SERVING)}")
    if text is not None and given(context, "ids"):
        raise InputError("--text and --ids both choose what the model reads; give one of them")
    watch, samples = Stopwatch(), (windows, tokens)
    if engine in SERVING:
        made = _gather_serving(engine, model, samples, seed, max_positions, engine_options)
    else:
        from slimkv.integrations.transformers.calibration.collect import gather_calibration
        from slimkv.integrations.transformers.calibration.samples import random_windows

        body = load_text(text) if text is not None else None
        with progress_bar() as progress:
            loaded = load_quietly(model, threads, device, dtype, progress)
            read = source = None
            if text is not None and body is not None:
                read = token_windows(loaded.tokenizer, body, *samples)
                source = f"{read.numel()} tokens of {Path(text).name}"
            elif ids == RANDOM:
                read = random_windows(loaded.model.config, *samples, seed)
                source = f"{read.numel()} random token ids, seed {seed}"
            made = gather_calibration(
                loaded.model, read, source=source, costs=chooses, max_positions=max_positions, samples=samples,
                seed=seed, progress=progress,
            )  # fmt: skip
    solution = None
    if chooses:
        solution = choose_widths(made, budget, profile)
        made = made.with_formats(solution.formats)
    path = output if output is not None else cached_path(models.source(model))
    made.save(path)
    result = _result(model, made, solution, path, watch.seconds)
    emit(result, as_json, *([] if as_json else _shown(result, solution)))


def _gather_serving(
    engine: str, name: str, samples: tuple[int, int], seed: int, max_positions: int | None, options: str | None
) -> Calibration:
    """The calibration, from statistics that the engine gathers."""
    try:
        chosen = {} if options is None else json.loads(options)
    except ValueError as error:
        raise InputError(f"--engine-options {options!r} is not JSON: {error}") from error
    if not isinstance(chosen, dict):
        raise InputError(f"--engine-options must be a JSON object, not {options}")
    require_engine(engine)
    observe = importlib.import_module(f"slimkv.integrations.{engine}.observe")
    source = models.source(name)
    with progress_bar() as progress:
        return observe.gather_calibration(
            source, samples=samples, seed=seed, max_positions=max_positions, progress=progress, **chosen
        )


def _result(model: str, made: Calibration, solution: Solution | None, out: Path, seconds: float) -> dict[str, Any]:
    gains = []
    for layer in made.layers.values():
        plain, query_aware = logit_noise(layer, made.seed, query_aware=False), logit_noise(layer, made.seed)
        gains.append(float((plain / query_aware.clamp(min=1e-30)).mean()))
    widths: dict[str, Any] | None = None
    if solution is not None:  # costs are only known relative to other layers and are not shown
        names = ("layer", "key_bits", "value_bits", "format")
        widths = {
            "choices": [{name: getattr(choice, name) for name in names} for choice in solution.choices],
            "bits_per_number": solution.bits_per_number,
            "bytes_per_token": solution.bytes_per_token,
        }
    return {
        "model": model,
        "source": made.source,
        "layers": len(made.layers),
        "num_kv_heads": sum(x.num_kv_heads for x in made.layers.values()),
        "file": str(out),
        "file_bytes": out.stat().st_size,
        "logit_error_reduction": gains,  # by layer: squared error of scores, plain over query-aware
        "max_positions": made.max_positions,
        "widths": widths,
        "seconds": seconds,
    }


def _shown(result: dict[str, Any], solution: Solution | None) -> list[Any]:
    gains = result["logit_error_reduction"]
    rows = [
        ("calibrated on", result["source"]),
        ("layers, KV heads in total", f"{result['layers']}, {result['num_kv_heads']}"),
        ("file", f"{result['file_bytes']:,} bytes"),
        ("squared error of scores", f"1/{min(gains):.2f} to 1/{max(gains):.2f} of plain rounding's"),
        ("valid up to position", f"{result['max_positions']:,}"),
        ("time", f"{result['seconds']:.1f} s"),
    ]
    tables = []
    if solution is not None:
        rows.append(("bits per number", f"{solution.bits_per_number:.3f}"))
        rows.append(("bytes per token", f"{solution.bytes_per_token:,.0f}"))
        choices = [(str(choice.layer), choice.format) for choice in solution.choices]
        tables = [make_table("widths per layer", "layer", "format", left=0, rows=choices)]
    return [make_table(f"{result['model']}: {result['file']}", "what", "value", rows=rows), *tables]
