"""``slimkv eval``: measurements. Each command is a function in this group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.eval_model import load_quietly, progress_bar
from slimkv.cli.options import AUTO, Device, Json, Output, Text, Threads, comma_list, count, option
from slimkv.cli.output import emit, make_table

if TYPE_CHECKING:
    from slimkv.lab.evals.samples import AttentionSample

app = typer.Typer(name="eval", help="Measure the quality loss of a format.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure the quality loss of a format."""


@app.command()
def attention(
    head_dim: Annotated[int, count("Head size of the synthetic samples.", 16)] = 128,
    model: Annotated[str | None, option("A model instead of synthetic samples: a name or a folder.")] = None,
    text: Text = "shipped",
    tokens: Annotated[int, count("Tokens of the text that the model reads.", 2)] = 1024,
    formats: Annotated[str, option("Formats to compare.", "--format")] = "ku4vu4,kur4vur4,k4v4,turboquant_4bit_nc,fp8",
    seeds: Annotated[int, count("Synthetic samples to average over.")] = 4,
    threads: Threads = None,
    device: Device = AUTO,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure the error of the attention output, by format and scale policy."""
    from dataclasses import asdict

    from slimkv.lab.evals.attention import average, compare_formats, compare_policies
    from slimkv.lab.evals.samples import heavy_tailed

    if model is None:
        samples = [heavy_tailed(heads=4, tokens=1024, dim=head_dim, seed=seed) for seed in range(seeds)]
    else:
        samples = _real_samples(model, text, tokens, threads, device)
    by_format = average([compare_formats(sample, comma_list(formats, str)) for sample in samples])
    by_policy = average([compare_policies(sample) for sample in samples])
    what = f"{len(samples)} " + ("synthetic samples" if model is None else f"layers of {model}")
    first = make_table(
        f"relative error of attention, head size {samples[0].key.shape[-1]}, mean of {what}",
        *("format", "bytes/token/head", "keys", "values", "output", "output, K only", "output, V only"),
    )
    for row in by_format:
        errors = (row.key, row.value, row.output, row.output_keys_only, row.output_values_only)
        first.add_row(row.format, f"{row.bytes_per_token_per_head:g}", *(f"{e:.4f}" for e in errors))
    second = make_table(
        "error of the output with only keys, or only values, quantised", "policy", "bits", "keys", "values",
        rows=((p.policy, str(p.bits), f"{p.keys:.4f}", f"{p.values:.4f}") for p in by_policy),
    )  # fmt: skip
    result = {"formats": [asdict(row) for row in by_format], "policies": [asdict(p) for p in by_policy]}
    emit(result, as_json, first, second, output=output)


def _real_samples(model: str, text: str, tokens: int, threads: int | None, device: str) -> list[AttentionSample]:
    from slimkv.lab.evals.samples import capture_attention
    from slimkv.lab.evals.texts import load_text, token_windows

    read = load_text(text)
    with progress_bar() as (_, progress):
        loaded = load_quietly(model, threads, device, "float32", progress)
        ids = token_windows(loaded.tokenizer, read, 1, tokens)
        return capture_attention(loaded.model, ids.to(loaded.model.device))
