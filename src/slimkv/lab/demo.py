"""The demonstration: what each width costs in bytes and in error, on keys and values that are hard to quantise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slimkv.lab.evals.attention import AttentionError, attention_error, compare_formats
from slimkv.lab.evals.distortion import measure_distortion
from slimkv.lab.evals.synthetic import heavy_tailed
from slimkv.spec import CodecSpec, PageLayout

WIDTHS = (2, 3, 4, 5, 6, 8)
ROBUSTNESS_FORMATS = ("ku4vu4", "kur4vur4", "k4v4", "turboquant_4bit_nc", "fp8")


@dataclass(frozen=True)
class WidthRow:
    """One width for K and V."""

    format: str
    bytes_per_token_per_head: float
    ratio_to_bf16: float
    distortion: float  # on random directions, the format's own scale policy
    key_error: float
    value_error: float
    output_error: float  # of attention on the synthetic sample


@dataclass(frozen=True)
class DemoReport:
    """What ``slimkv demo`` prints."""

    head_dim: int
    tokens: int
    heads: int
    widths: tuple[WidthRow, ...]
    robustness: tuple[AttentionError, ...]
    plot: str | None
    seconds: float


def run_demo(
    out: Path | None,
    head_dim: int = 128,
    tokens: int = 2048,
    heads: int = 4,
    seed: int = 0,
    step: Callable[[str], None] = print,
) -> DemoReport:
    """Compresses synthetic K and V at every width; writes ``demo.png`` into ``out`` if given.

    ``step`` is told what is being measured.
    """
    start = time.perf_counter()
    step(f"drawing {heads} heads x {tokens} tokens of heavy-tailed keys and values")
    sample = heavy_tailed(heads, tokens, head_dim, seed=seed)
    rows = []
    for bits in WIDTHS:
        format = f"k{bits}v{bits}"
        step(f"measuring {format}")
        spec = CodecSpec.parse(format, head_dim)
        error = attention_error(sample, spec, format)
        random = measure_distortion(head_dim, [bits], [spec.key.policy], vectors=4096).widths[0].policies[0]
        layout = PageLayout(spec, 16)
        rows.append(
            WidthRow(
                format,
                layout.bytes_per_token,
                layout.compression_ratio,
                random.mse,
                error.key,
                error.value,
                error.output,
            )
        )
    step("comparing with and without rotation")
    robustness = tuple(compare_formats(sample, ROBUSTNESS_FORMATS))
    plot = None
    if out is not None:
        plot = str(_plot(rows, robustness, out / "demo.png"))
    return DemoReport(head_dim, tokens, heads, tuple(rows), robustness, plot, time.perf_counter() - start)


def _plot(rows: list[WidthRow], robustness: tuple[AttentionError, ...], path: Path) -> Path:
    from slimkv.lab.evals.plots import figure

    with figure(path, columns=2) as (_, (left, right)):
        size = [r.bytes_per_token_per_head for r in rows]
        left.semilogy(size, [r.output_error for r in rows], "o-", color="tab:blue", label="attention output")
        left.semilogy(size, [r.key_error for r in rows], "s--", color="tab:orange", label="keys")
        left.semilogy(size, [r.value_error for r in rows], "^--", color="tab:green", label="values")
        for row in rows:
            left.annotate(
                row.format, (row.bytes_per_token_per_head, row.output_error), (4, 6), textcoords="offset points"
            )
        bf16 = rows[0].bytes_per_token_per_head * rows[0].ratio_to_bf16
        left.margins(x=0.12, y=0.1)
        left.set_xlabel(f"bytes per token and KV head (bf16: {bf16:.0f})")
        left.set_ylabel("relative error")
        left.set_title("Error against bytes")
        left.legend()
        names = [r.format for r in robustness]
        bars = right.bar(names, [r.output for r in robustness], color="tab:blue")
        right.bar_label(bars, fmt="%.3f")
        right.set_ylabel("relative error of attention output")
        right.set_title("With and without rotation, heavy-tailed K/V")
    return path
