"""``slimkv eval``: measurements. Each command is a function in this group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.options import Json, comma_list, user_errors, widths
from slimkv.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.lab.evals.distortion import DistortionReport
    from slimkv.lab.evals.synthetic import AttentionSample

app = typer.Typer(name="eval", help="Measure what a format costs in quality.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure what a format costs in quality."""


@app.command()
def distortion(
    head_dim: Annotated[int, typer.Option(help="Head size: a multiple of 16 up to 1024.")] = 128,
    bits: Annotated[str, typer.Option(help="Widths, such as 4 or 2,3,4 or 1-8.")] = "1-8",
    policy: Annotated[
        str, typer.Option(help="Scale policies to regress: plain,norm,unbiased.")
    ] = "plain,norm,unbiased",
    seed: Annotated[int, typer.Option(help="Of the random vectors.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here.")] = None,
    as_json: Json = False,
) -> None:
    """Error of Lloyd-Max codes on random directions, against theory, and the slopes of the scale policies."""
    from slimkv.cli.output import emit
    from slimkv.lab.evals.distortion import measure_distortion, plot_distortion
    from slimkv.spec import parse_policy

    with user_errors():
        report = measure_distortion(head_dim, widths(bits), comma_list(policy, parse_policy), seed=seed)
        if plot is not None:
            plot_distortion(report, plot)
    emit(report, as_json, *([] if as_json else _tables(report)))


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
def query_aware(
    calibration: Annotated[
        Path | None, typer.Option(help="A file from slimkv calibrate; default: a made-up second moment.")
    ] = None,
    layer: Annotated[int, typer.Option(help="Of the calibration.")] = 0,
    head: Annotated[int, typer.Option(help="KV head of that layer.")] = 0,
    head_dim: Annotated[int, typer.Option(help="Head size, without a calibration.")] = 128,
    bits: Annotated[str, typer.Option(help="Widths, such as 4 or 2,3,4 or 1-8.")] = "2-6",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the errors before and after here.")] = None,
    as_json: Json = False,
) -> None:
    """Query-aware rounding by itself: the squared error that queries see, relative to plain rounding's."""
    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.query_aware import measure_query_aware, plot_query_aware, skewed_moment

    with user_errors():
        moment, source = skewed_moment(head_dim), "a made-up second moment"
        if calibration is not None:
            from slimkv.calibration import Calibration

            found = Calibration.load(calibration).statistics(layer).moment_at(0, 1024)
            if not 0 <= head < len(found):
                raise InputError(f"layer {layer} has KV heads 0 to {len(found) - 1}, not {head}")
            moment, source = found[head], f"{calibration.name}, layer {layer}, KV head {head}"
        report = measure_query_aware(moment, widths(bits), source=source)
        if plot is not None:
            plot_query_aware(moment, plot)
    table = Table(title=f"squared error over plain rounding's; {source}")
    searches = "search 2", "search 4"
    for name in ("bits", "seen by queries", "predicted", "plain scale", "second sweep", *searches, "of the key"):
        table.add_column(name, justify="right")
    for row in report.rows:
        numbers = row.query_aware, row.predicted, row.plain_scale, row.second_sweep, row.search_2, row.search_4
        table.add_row(str(row.bits), *(f"{x:.3f}" for x in (*numbers, row.isotropic)))
    emit(report, as_json, table)


@app.command()
def scales(
    head_dim: Annotated[int, typer.Option(help="Head size: a multiple of 16 up to 1024.")] = 128,
    bits: Annotated[str, typer.Option(help="Widths, such as 4 or 2,3,4 or 1-8.")] = "2,4,6,7,8",
    as_json: Json = False,
) -> None:
    """What storing the scale as float16, bfloat16 or slimkv's own 16-bit format costs."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.scales import compare_scale_formats

    with user_errors():
        results = compare_scale_formats(head_dim, widths(bits))
    table = Table(title="squared error over that of an exact scale; at 4 bits for extreme norms")
    table.add_column("scale")
    for width in results[0].widths:
        table.add_column(f"{width} bits", justify="right")
    for norm in results[0].at_norm:
        table.add_column(f"norm {norm}", justify="right")
    for r in results:
        extremes = ("overflow" if v is None else f"{v:.4g}" for v in r.at_norm.values())
        table.add_row(r.name, *(f"{v:.4f}" for v in r.over_exact), *extremes)
    emit([asdict(r) for r in results], as_json, table)


@app.command()
def attention(
    head_dim: Annotated[int, typer.Option(help="Head size of the synthetic samples.")] = 128,
    model: Annotated[str | None, typer.Option(help="A model instead of synthetic samples: a name or a folder.")] = None,
    text: Annotated[Path | None, typer.Option(help="What the model reads: a text file.")] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.")] = 1024,
    formats: Annotated[
        str, typer.Option("--format", help="Formats to compare.")
    ] = "ku4vu4,kur4vur4,k4v4,turboquant_4bit_nc,fp8",
    seeds: Annotated[int, typer.Option(help="Samples to average over.")] = 4,
    as_json: Json = False,
) -> None:
    """Error of attention on synthetic keys and values or a model's own, by format and by scale policy."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.attention import average, compare_formats, compare_policies
    from slimkv.lab.evals.synthetic import heavy_tailed

    with user_errors():
        if model is None:
            samples = [heavy_tailed(heads=4, tokens=1024, dim=head_dim, seed=seed) for seed in range(seeds)]
        else:
            samples = _real_samples(model, text, tokens)
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
    emit(result, as_json, first, second)


@app.command()
def latent(
    formats: Annotated[
        str, typer.Option("--format", help="Latent formats to compare.")
    ] = "crawr8,crawrfp8,crawr6,crawr4,c4,c4r8,c4rfp8,c4r6,c4r4,c6,c6r8,c8r8",
    latent_dim: Annotated[int, typer.Option(help="Numbers of the latent (kv_lora_rank).")] = 512,
    rope_dim: Annotated[int, typer.Option(help="Numbers of the rope part (qk_rope_head_dim).")] = 64,
    seeds: Annotated[int, typer.Option(help="Samples of each kind.")] = 4,
    as_json: Json = False,
) -> None:
    """Error of latent attention (MLA) on made-up latents and rope parts, by format. No model is measured."""
    from dataclasses import asdict

    from rich.table import Table

    from slimkv.cli.output import emit
    from slimkv.lab.evals.latent import compare_latent_formats

    with user_errors():
        rows = compare_latent_formats(comma_list(formats, str), latent_dim, rope_dim, seeds)
    table = Table(title=f"relative error, latents of {latent_dim}, rope parts of {rope_dim}, {seeds} samples of a kind")
    for name in ("samples", "format", "bytes/token", "latent", "rope", "output", "latent only", "rope only"):
        table.add_column(name, justify="left" if name in ("samples", "format") else "right")
    for row in rows:
        errors = row.latent, row.rope, row.output, row.output_latent_only, row.output_rope_only
        table.add_row(row.kind, row.format, f"{row.bytes_per_token:g}", *(f"{e:.4f}" for e in errors))
    emit([asdict(row) for row in rows], as_json, table)


def _real_samples(model: str, text: Path | None, tokens: int) -> list[AttentionSample]:
    import torch

    from slimkv.lab.evals.capture import capture_attention
    from slimkv.lab.models import load

    if text is None or not text.is_file():
        raise typer.BadParameter("--model needs --text, a file for it to read")
    loaded = load(model)
    ids = loaded.tokenizer(text.read_text(encoding="utf-8")[: 20 * tokens])["input_ids"][:tokens]
    return capture_attention(loaded.model, torch.tensor([ids]))
