"""Results of the suite in a document, between two markers.

``python -m slimkv.lab.suite.document docs/guides/suite.md benchmarks/results`` rewrites them from its ``suite-*.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimkv.errors import InputError
from slimkv.lab.suite.summary import Document
from slimkv.lab.suite.words import words
from slimkv.lab.suite.written import markdown_table, read_results

START, END = "<!-- suite results -->", "<!-- end -->"


def section(results: Document) -> str:
    """One run: what it was, its table, what its tests say, and its command."""
    run, size = results["run"], results["settings"]["size"]
    asked = next((row["answers"]["asked"] for row in results["summary"]["rows"] if "answers" in row), 0)
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
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


def filled(text: str, results: list[Document]) -> str:
    """``text`` with the results between its markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"the document has no {START} ... {END} to fill")
    return f"{before}{START}\n" + "".join(f"\n{section(one)}\n" for one in results) + f"\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrites a document from a folder of results."""
    if len(arguments) != 2:
        print("usage: python -m slimkv.lab.suite.document DOCUMENT FOLDER", file=sys.stderr)
        return 2
    document = Path(arguments[0])
    document.write_text(filled(document.read_text(encoding="utf-8"), results_in(Path(arguments[1]))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
