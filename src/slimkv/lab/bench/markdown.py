"""Writes reports as Markdown tables between two markers of a document.

``python -m slimkv.lab.bench.markdown docs/design/kernels.md benchmarks/results`` rewrites the tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimkv.lab.bench.results import Report, Row, load
from slimkv.lab.report.markdown import filled, rewrite, table_line
from slimkv.lab.report.page import versions_line

START = "<!-- bench table -->"
NAMES = {
    "fa3_bf16": "FA3 bf16",
    "fa3_fp8": "FA3 fp8",
    "vllm_4bit_nc": "vLLM `turboquant_4bit_nc`",
    "sdpa": "torch SDPA",
    "sdpa_bf16": "torch SDPA on bf16",
    "copy": "a copy of as many bytes",
    "scatter": "torch `index_put`, bf16",
}
LATENT_NAMES = {
    "flashmla_bf16": "FlashMLA bf16",
    "flashmla_fp8": "FlashMLA fp8",
    "flash_attn_mla_bf16": "FA3 latents bf16",
    "vllm_mla": "vLLM `concat_and_cache_mla`, bf16",
}
NAMES |= LATENT_NAMES


def reports_in(folder: Path) -> list[Report]:
    """The reports of attend and store in ``folder``, by file name."""
    return [load(path) for name in ("attend", "store") for path in sorted(folder.glob(f"{name}-*.json"))]


def table(report: Report) -> str:
    """One report: where it was measured, a row per cell, and the cost of the rotation. Latents have other baselines and
    a separate table.
    """
    lines = [
        f"`{report.operation}` on one {report.device} ({report.copy_bytes_per_second / 1e12:.2f} TB/s copy), "
        f"{report.date}; {versions_line(report.versions)}; `{report.command}`:"
    ]
    latents = [row for row in report.rows if any(b.name in LATENT_NAMES for b in row.baselines)]
    for rows in ([row for row in report.rows if row not in latents], latents):
        if rows:
            lines += ["", *_table(rows)]
    for r in report.rotation:
        lines += [
            "",
            f"The rotation ({r.backend}): {_time(r.without_ms)} without, {_time(r.with_ms)} with ({r.cost:+.1%}).",
        ]
    present = {b.name for row in report.rows for b in row.baselines if b.ms is not None}
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None and b.name not in present}
    for name, detail in absent.items():
        lines += ["", f"{NAMES[name]} is absent: {detail}."]
    return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    """A column for every baseline that ran."""
    present = list(dict.fromkeys(b.name for row in rows for b in row.baselines if b.ms is not None))
    with_error = any(row.error is not None for row in rows)
    head = ["cell", "format", "backend", "time", "of copy bandwidth", *(f"{NAMES[n]} takes" for n in present)]
    head += ["error"] if with_error else []
    lines = [table_line(head), table_line(["---"] * len(head))]
    for row in rows:
        cells = [row.cell, f"`{row.format}`", row.backend, _time(row.ms), _share(row)]
        cells += [_ratio(row, name) for name in present]
        cells += [f"{row.error:.1e}" if row.error is not None else ""] if with_error else []
        lines.append(table_line(cells))
    return lines


def _time(ms: float) -> str:
    return f"{ms:.3f} ms" if ms >= 0.1 else f"{1e3 * ms:.1f} µs"


def _share(row: Row) -> str:
    return f"{row.tflops:.0f} TFLOP/s" if row.tflops is not None else f"{row.fraction_of_copy:.0%}"


def _ratio(row: Row, name: str) -> str:
    found = row.baseline(name)
    return "-" if found is None or found.ratio is None else f"{found.ratio:.2f}\N{MULTIPLICATION SIGN}"


def fill(text: str, folder: Path) -> str:
    """``text`` with the tables of the reports in ``folder`` between its markers."""
    return filled(text, START, "".join(f"\n{table(report)}\n" for report in reports_in(folder)))


if __name__ == "__main__":
    sys.exit(rewrite("slimkv.lab.bench.markdown", sys.argv[1:], fill))
