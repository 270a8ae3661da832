"""Reports as Markdown tables, and putting them into a document between two markers.

``python -m slimkv.lab.bench.markdown docs/design/kernels.md benchmarks/results`` rewrites the tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimkv.errors import InputError
from slimkv.lab.bench.results import Report, Row, load

START, END = "<!-- bench table -->", "<!-- end -->"
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
    """One report: where it was measured, a row per cell, and what the rotation costs.

    Latents, which have baselines of their own, get a table of their own.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"`{report.operation}` on one {report.device} ({report.copy_bytes_per_second / 1e12:.2f} TB/s copy), "
        f"{report.date}; {versions}; `{report.command}`:"
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
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        cells = [row.cell, f"`{row.format}`", row.backend, _time(row.ms), _share(row)]
        cells += [_ratio(row, name) for name in present]
        cells += [f"{row.error:.1e}" if row.error is not None else ""] if with_error else []
        lines.append(_row(cells))
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(ms: float) -> str:
    return f"{ms:.3f} ms" if ms >= 0.1 else f"{1e3 * ms:.1f} µs"


def _share(row: Row) -> str:
    return f"{row.tflops:.0f} TFLOP/s" if row.tflops is not None else f"{row.fraction_of_copy:.0%}"


def _ratio(row: Row, name: str) -> str:
    found = row.baseline(name)
    return "-" if found is None or found.ratio is None else f"{found.ratio:.2f}\N{MULTIPLICATION SIGN}"


def filled(text: str, reports: list[Report]) -> str:
    """``text`` with the tables of ``reports`` between its markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"the document has no {START} ... {END} to fill")
    tables = "".join(f"\n{table(report)}\n" for report in reports)
    return f"{before}{START}\n{tables}{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrites a document's tables from a folder of reports."""
    if len(arguments) != 2:
        print("usage: python -m slimkv.lab.bench.markdown DOCUMENT FOLDER", file=sys.stderr)
        return 2
    document = Path(arguments[0])
    document.write_text(filled(document.read_text(encoding="utf-8"), reports_in(Path(arguments[1]))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
