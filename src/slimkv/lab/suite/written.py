"""The files of a run: ``results.json``, ``results.csv``, ``summary.md`` and ``report.html``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimkv.errors import InputError
from slimkv.lab.report.page import table_line, versions_line
from slimkv.lab.suite.page import html
from slimkv.lab.suite.summary import SHOWN, Document, summarise, words
from slimkv.paths import read_json

COLUMNS = ("format", "part", "metric", "task", "length", "value", "low", "high", "p", "verdict")


def write_all(document: Document, folder: Path) -> Document:
    """Adds the summary to a run's document, and writes everything."""
    document = {**document, "summary": summarise(document)}
    text = json.dumps(document, indent=1, allow_nan=False)
    for name, content in (
        ("results.json", text + "\n"),
        ("results.csv", as_csv(document)),
        ("summary.md", as_markdown(document)),
        ("report.html", html(document)),
    ):
        (folder / name).write_text(content, encoding="utf-8")
    return document


def read_results(folder: Path) -> Document:
    """The document of a run, from its folder or its ``results.json``."""
    path = folder / "results.json" if folder.is_dir() else folder
    if not path.is_file():
        raise InputError(f"{folder} has no results.json; give the folder of a finished slimkv suite run")
    found = read_json(path)
    if not isinstance(found, dict) or "summary" not in found or "rows" not in found["summary"]:
        raise InputError(f"{path} is not a result of slimkv suite")
    return found


def metrics(document: Document) -> Iterator[dict[str, Any]]:
    """Every number of the summary as one row of ``COLUMNS``; missing figures are left out."""
    for row in document["summary"]["rows"]:
        base = {"format": row["format"]}
        for part, name in (("memory", "bytes_per_token"), ("memory", "tokens_fit"), ("agreement", "perplexity"),
                           ("agreement", "kl"), ("agreement", "kl_99"), ("agreement", "top1")):  # fmt: skip
            if row.get(name) is not None:
                yield {**base, "part": part, "metric": name, "value": row[name]}
        for part, name, key in (("agreement", "perplexity_over_raw", "perplexity_test"),
                                ("tasks", "answers_over_raw", "answers_test")):  # fmt: skip
            if key in row:
                yield {**base, "part": part, "metric": name, **_test(row[key])}
        for part, name in (("tasks", "answers"), ("needle", "needle")):
            if name in row:
                yield {**base, "part": part, "metric": name, **{k: row[name][k] for k in ("value", "low", "high")}}
        for part, key in (("drafts", "drafts"), ("generate", "decode")):
            for name, value in row.get(key, {}).items():
                if value is not None:
                    yield {**base, "part": part, "metric": name, "value": value}
        tests = row.get("lm_eval_tests", {})
        for task, found in row.get("lm_eval", {}).items():
            for name, value in found.items():
                more = _test(tests[f"{task}/{name}"]) if f"{task}/{name}" in tests else {}
                yield {**base, "part": "lm-eval", "metric": name, "task": task, **more, "value": value}
    for row in document["summary"]["tasks"]:
        more = {k: row["test"][k] for k in ("p", "verdict")} if "test" in row else {}
        named = {k: row[k] for k in ("format", "task", "length", "value", "low", "high")}
        yield {**named, "part": "tasks", "metric": "exact_match", **more}


def _test(test: Document) -> dict[str, Any]:
    p = test.get("p_corrected", test["p"])
    return {"value": test["difference"], "low": test["low"], "high": test["high"], "p": p, "verdict": test["verdict"]}


def as_csv(document: Document) -> str:
    """One line for every number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics(document))
    return out.getvalue()


def table_rows(document: Document) -> list[list[str]]:
    """A header and a row for each cache, formatted for reading; empty columns are left out."""
    rows = document["summary"]["rows"]
    kept = [column for column in SHOWN if any(column.text(row) for row in rows)]
    return [
        ["cache", *(column.title for column in kept)],
        *([row["format"], *(c.text(row) for c in kept)] for row in rows),
    ]


def markdown_table(document: Document) -> str:
    """The rows of ``table_rows``."""
    header, *rows = table_rows(document)
    aligned = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(table_line(cells) for cells in (header, aligned, *rows))


def as_markdown(document: Document) -> str:
    """The table, its summary in words, and the command that reproduces it."""
    lines = [f"# slimkv suite {document['suite']}: {document['model']}", "", markdown_table(document), ""]
    lines += [f"- {told}" for told in words(document)]
    if document["failed"]:
        lines += ["", "Failed:", ""]
        lines += [f"- {p['title']}: {p['error'].splitlines()[0]}" for p in document["parts"] if p["status"] == "failed"]
    run = document["run"]
    versions = versions_line(run["versions"])
    lines += [
        "",
        f"`{run['command']}`, {document['seconds']:.0f} seconds on {run['device']}, {run['date']}; {versions}.",
    ]
    return "\n".join(lines) + "\n"
