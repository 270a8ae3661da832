"""Writes tables of results into the documentation, between two markers.

    python benchmarks/documents.py        # rewrites docs/design/kernels.md and docs/guides/suite.md

The tables come from the reports in ``benchmarks/results``. A test fails if they are out of date.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from slimkv.errors import InputError
from slimkv.lab.bench.results import Baseline, Report, Row
from slimkv.lab.report.page import table_line, versions_line
from slimkv.lab.suite.summary import Document, words
from slimkv.lab.suite.written import markdown_table, read_results

ROOT = Path(__file__).parent.parent
END = "<!-- end -->"  # the marker after the results in a document
NAMES = {
    "fa2_bf16": "FA2 bf16",
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


def load(path: Path) -> Report:
    """Reads a report written by ``slimkv bench --output``. Fields that no longer exist in reports are ignored."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [{**row, "baselines": [_made(Baseline, b) for b in row["baselines"]]} for row in data["rows"]]
    return _made(Report, {**data, "rows": [_made(Row, row) for row in rows]})


def _made(kind: Any, data: dict[str, Any]) -> Any:
    return kind(**{field.name: data[field.name] for field in fields(kind)})


def filled(text: str, start: str, body: str) -> str:
    """Replaces the text between the marker ``start`` and the next ``<!-- end -->`` with ``body``."""
    before, found, rest = text.partition(start)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise InputError(f"the document has no {start} ... {END} to fill")
    return f"{before}{start}\n{body}{END}{after}"


def table(report: Report) -> str:
    """One report: where it was measured, a row per cell, and the cost of the rotation. Latents get a separate table
    because their baselines differ.
    """
    lines = [
        f"`{report.operation}` on one {report.device} ({report.copy_bytes_per_second / 1e12:.2f} TB/s copy), "
        f"{report.date}; {versions_line(report.versions)}; `{report.command}`:"
    ]
    latents = [row for row in report.rows if any(b.name in LATENT_NAMES for b in row.baselines)]
    for rows in ([row for row in report.rows if row not in latents], latents):
        if rows:
            lines += ["", *_table(rows)]
    times = {(row.cell, row.backend): row.ms for row in report.rows}
    for (cell, backend), without in times.items():
        with_it = times.get((cell.replace("rotation-off-", "rotation-on-"), backend))
        if cell.startswith("rotation-off-") and with_it is not None:
            cost = f"{with_it / without - 1:+.1%}"
            lines += ["", f"The rotation ({backend}): {_time(without)} without, {_time(with_it)} with ({cost})."]
    present = {b.name for row in report.rows for b in row.baselines if b.ms is not None}
    absent = {b.name: b.detail for row in report.rows for b in row.baselines if b.ms is None and b.name not in present}
    for name, detail in absent.items():
        lines += ["", f"{NAMES[name]} is absent: {detail}."]
    return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    """A table with one column per baseline that ran."""
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


def section(results: Document) -> str:
    """One run: its command and settings, its table, and the outcome of its statistical tests."""
    run, size = results["run"], results["settings"]["size"]
    asked = next((row["answers"]["asked"] for row in results["summary"]["rows"] if "answers" in row), 0)
    versions = versions_line(run["versions"])
    lengths = " and ".join(f"{length:,}" for length in size["lengths"])
    took = f"{results['seconds'] / 60:.0f} minutes ({results['cpu_seconds'] / 60:.0f} of processor time)"
    lines = [
        f"### `{results['suite']}` on {results['model']}",
        "",
        f"`{run['command']}`, {results['engine']} on {run['device']}, {_threads(run['cpu_threads'])}, {took}, "
        f"{run['date']}; {versions}. {size['windows']} windows of {size['window_tokens']:,} tokens; {asked} questions "
        f"in contexts of {lengths} tokens.",
        "",
        markdown_table(results),
        "",
        *(f"- {line}" for line in words(results)),
    ]
    return "\n".join(lines)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def fill_kernels(text: str, folder: Path) -> str:
    """Fills the marked section of ``text`` with the attend and store reports in ``folder``."""
    paths = [path for name in ("attend", "store") for path in sorted(folder.glob(f"{name}-*.json"))]
    return filled(text, "<!-- bench table -->", "".join(f"\n{table(load(path))}\n" for path in paths))


def fill_suite(text: str, folder: Path) -> str:
    """Fills the marked section of ``text`` with the suite results in ``folder``."""
    found = [read_results(path) for path in sorted(folder.glob("suite-*.json"))]
    return filled(text, "<!-- suite results -->", "".join(f"\n{section(one)}\n" for one in found) + "\n")


DOCUMENTS = {ROOT / "docs" / "design" / "kernels.md": fill_kernels, ROOT / "docs" / "guides" / "suite.md": fill_suite}


def main() -> None:
    """Rewrites the documents."""
    for path, fill in DOCUMENTS.items():
        path.write_text(fill(path.read_text(encoding="utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
