"""``slimkv eval``: measurements. Each command is a function in this group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimkv.cli.options import Json, user_errors, widths, words

if TYPE_CHECKING:
    from rich.table import Table

    from slimkv.evals.distortion import DistortionReport

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
    from slimkv.evals.distortion import measure_distortion, plot_distortion
    from slimkv.spec import parse_policy

    with user_errors():
        report = measure_distortion(head_dim, widths(bits), words(policy, parse_policy), seed=seed)
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
