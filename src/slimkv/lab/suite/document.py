"""Results of the suite in a document, between two markers.

``python -m slimkv.lab.suite.document docs/guides/suite.md benchmarks/results`` rewrites them from its ``suite-*.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimkv.lab.report.markdown import filled, rewrite
from slimkv.lab.report.page import versions_line
from slimkv.lab.suite.summary import Document
from slimkv.lab.suite.words import words
from slimkv.lab.suite.written import markdown_table, read_results

START = "<!-- suite results -->"


def section(results: Document) -> str:
    """One run: what it was, its table, what its tests say, and its command."""
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


def results_in(folder: Path) -> list[Document]:
    """The results ``suite-*.json`` in ``folder``, by file name."""
    return [read_results(path) for path in sorted(folder.glob("suite-*.json"))]


def fill(text: str, folder: Path) -> str:
    """``text`` with the results of ``folder`` between its markers."""
    return filled(text, START, "".join(f"\n{section(one)}\n" for one in results_in(folder)) + "\n")


if __name__ == "__main__":
    sys.exit(rewrite("slimkv.lab.suite.document", sys.argv[1:], fill))
