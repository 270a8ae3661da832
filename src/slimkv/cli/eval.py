"""``slimkv eval``: measurements. Each command is a function in this group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.options import AUTO, Device, Json, Output, Plot, Text, Threads, at_least, comma_list, widths

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.lab.evals.distortion import DistortionReport
    from slimkv.lab.evals.synthetic import AttentionSample

app = typer.Typer(name="eval", help="Measure the quality loss of a format.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure the quality loss of a format."""


@app.command()
def distortion(
    head_dim: Annotated[int, typer.Option(help="Head size: a multiple of 16 up to 1024.")] = 128,
    bits: Annotated[str, typer.Option(help="Widths, such as 4 or 2,3,4 or 1-8.")] = "1-8",
    policy: Annotated[
        str, typer.Option(help="Scale policies to regress: plain,norm,unbiased.")
    ] = "plain,norm,unbiased",
    seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
    plot: Plot = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Error of Lloyd-Max codes on random directions, compared with theory, and the slopes of the scale policies."""
    from slimkv.cli.output import emit
    from slimkv.lab.evals.distortion import measure_distortion, plot_distortion
    from slimkv.spec import parse_policy

    report = measure_distortion(head_dim, widths(bits), comma_list(policy, parse_policy), seed=seed)
    if plot is not None:
        plot_distortion(report, plot)
    emit(report, as_json, *([] if as_json else _tables(report)), output=output)


def _tables(report: DistortionReport) -> list[Table]:
    from rich.table import Table

    errors = Table(
        title=f"squared error / squared norm, head size {report.head_dim}, {report.vectors} random directions"
    )
    for name in ("bits", "measured", "Gaussian optimum", "ratio", f"optimum for {report.head_dim}", "ratio", "bound"):
        errors.add_column(name, justify="right")
    slopes = Table(title="slope of ⟨q, x̂⟩ on ⟨q, x⟩: measured (theory)")
    slopes.add_column("bits", justify="right")
    for policy in report.widths[0].policies if report.widths else ():
        slopes.add_column(policy.policy, justify="right")
    for w in report.widths:
        gaussian, own = f"{w.gaussian_optimum:.6f}", f"{w.dim_optimum:.6f}"
        ratios = f"{w.over_gaussian:.4f}", f"{w.over_dim:.4f}"
        errors.add_row(str(w.bits), f"{w.mse:.6f}", gaussian, ratios[0], own, ratios[1], f"{w.paper_bound:.6f}")
        slopes.add_row(str(w.bits), *(f"{p.slope:.5f} ({p.slope_theory:.5f})" for p in w.policies))
    return [errors, slopes]


@app.command()
def attention(
    head_dim: Annotated[int, typer.Option(help="Head size of the synthetic samples.")] = 128,
    model: Annotated[str | None, typer.Option(help="A model instead of synthetic samples: a name or a folder.")] = None,
    text: Text = "shipped",
    tokens: Annotated[int, typer.Option(help="Tokens of the text that the model reads.", callback=at_least(2))] = 1024,
    formats: Annotated[
        str, typer.Option("--format", help="Formats to compare.")
    ] = "ku4vu4,kur4vur4,k4v4,turboquant_4bit_nc,fp8",
    seeds: Annotated[int, typer.Option(help="Synthetic samples to average over.", callback=at_least(1))] = 4,
    threads: Threads = None,
    device: Device = AUTO,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Error of the attention output on synthetic samples or a model's layers, by format and scale policy."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.attention import average, compare_formats, compare_policies
    from slimkv.lab.evals.synthetic import heavy_tailed

    if model is None:
        samples = [heavy_tailed(heads=4, tokens=1024, dim=head_dim, seed=seed) for seed in range(seeds)]
    else:
        samples = _real_samples(model, text, tokens, threads, device)
    by_format = average([compare_formats(sample, comma_list(formats, str)) for sample in samples])
    by_policy = average([compare_policies(sample) for sample in samples])
    what = f"{len(samples)} " + ("synthetic samples" if model is None else f"layers of {model}")
    first = Table(title=f"relative error of attention, head size {samples[0].key.shape[-1]}, mean of {what}")
    for name in ("format", "bytes/token/head", "keys", "values", "output", "output, K only", "output, V only"):
        first.add_column(name, justify="left" if name == "format" else "right")
    for row in by_format:
        errors = (row.key, row.value, row.output, row.output_keys_only, row.output_values_only)
        first.add_row(row.format, f"{row.bytes_per_token_per_head:g}", *(f"{e:.4f}" for e in errors))
    second = Table(title="error of the output with only keys, or only values, quantised")
    for name in ("bits", "policy", "keys", "values"):
        second.add_column(name, justify="left" if name == "policy" else "right")
    for p in by_policy:
        second.add_row(str(p.bits), p.policy, f"{p.keys:.4f}", f"{p.values:.4f}")
    result = {"formats": [asdict(row) for row in by_format], "policies": [asdict(p) for p in by_policy]}
    emit(result, as_json, first, second, output=output)


@app.command()
def latent(
    formats: Annotated[
        str, typer.Option("--format", help="Latent formats to compare.")
    ] = "crawr8,crawrfp8,crawr6,crawr4,c4,c4r8,c4rfp8,c4r6,c4r4,c6,c6r8,c8r8",
    latent_dim: Annotated[int, typer.Option(help="Size of the latent (kv_lora_rank).")] = 512,
    rope_dim: Annotated[int, typer.Option(help="Size of the rope part (qk_rope_head_dim).")] = 64,
    seeds: Annotated[int, typer.Option(help="Samples of each kind.", callback=at_least(1))] = 4,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Error of latent attention (MLA) on synthetic latents and rope parts, by format."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.latent import compare_latent_formats

    rows = compare_latent_formats(comma_list(formats, str), latent_dim, rope_dim, seeds)
    table = Table(title=f"relative error, latents of {latent_dim}, rope parts of {rope_dim}, {seeds} samples of a kind")
    for name in ("samples", "format", "bytes/token", "latent", "rope", "output", "latent only", "rope only", "centred"):
        table.add_column(name, justify="left" if name in ("samples", "format") else "right")
    for row in rows:
        errors = (
            row.latent, row.rope, row.output, row.output_latent_only, row.output_rope_only, row.output_centred,
        )  # fmt: skip
        table.add_row(row.kind, row.format, f"{row.bytes_per_token:g}", *(f"{e:.4f}" for e in errors))
    emit([asdict(row) for row in rows], as_json, table, output=output)


def _real_samples(model: str, text: str, tokens: int, threads: int | None, device: str) -> list[AttentionSample]:
    from slimkv.cli.eval_model import load_quietly, progress_bar
    from slimkv.lab.evals.capture import capture_attention
    from slimkv.lab.evals.texts import load_text, token_windows

    read = load_text(text)
    with progress_bar() as (_, progress):
        loaded = load_quietly(model, threads, device, "float32", progress)
        ids = token_windows(loaded.tokenizer, read, 1, tokens)
        return capture_attention(loaded.model, ids.to(loaded.model.device))
