"""Compares two runs: their differences, and all figures that both contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimkv.lab.evals.statistics import NOT_DISTINGUISHABLE, paired_answers, verdict
from slimkv.lab.report.page import table_line
from slimkv.lab.suite.summary import Document, Questions
from slimkv.lab.suite.written import metrics


@dataclass(frozen=True)
class Line:
    """One figure in both runs."""

    format: str
    metric: str
    task: str
    length: int | None
    a: float
    b: float
    difference: float  # b minus a
    verdict: str  # of b: better, worse, not distinguishable, same; empty without a test


@dataclass(frozen=True)
class Comparison:
    """Two runs."""

    a: str
    b: str
    settings: dict[str, tuple[Any, Any]]  # settings that differ
    lines: tuple[Line, ...]
    only_a: int  # figures of only one run
    only_b: int


def _identity(document: Document) -> dict[str, Any]:
    """The description of a run as a flat mapping."""
    flat: dict[str, Any] = {name: document[name] for name in ("suite", "model", "engine")}
    settings = document["settings"]
    flat |= {name: value for name, value in settings.items() if name not in ("size", "model", "engine", "name")}
    flat |= {f"size.{name}": value for name, value in settings["size"].items()}
    flat |= {f"version of {name}": value for name, value in document["run"]["versions"].items()}
    flat["device"] = document["run"]["device"]
    return flat


def _figures(document: Document) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(m["format"], m["metric"], m.get("task", ""), m.get("length")): m for m in metrics(document)}


def compare(a: Document, b: Document, name_a: str = "A", name_b: str = "B") -> Comparison:
    """All figures that both runs contain. Answers to the same questions are tested in pairs."""
    first, second = _identity(a), _identity(b)
    names = dict.fromkeys([*first, *second])
    differs = {n: (first.get(n), second.get(n)) for n in names if first.get(n) != second.get(n)}
    left, right = _figures(a), _figures(b)
    tests = _tests(a, b)
    lines = []
    for key, figure in left.items():
        if key not in right:
            continue
        one, other = float(figure["value"]), float(right[key]["value"])
        format, metric, task, length = key
        verdict = tests.get(key, "same" if one == other else "")
        lines.append(Line(format, metric, task, length, one, other, other - one, verdict))
    return Comparison(
        name_a, name_b, differs, tuple(lines), len(left.keys() - right.keys()), len(right.keys() - left.keys())
    )


def _tests(a: Document, b: Document) -> dict[tuple[Any, ...], str]:
    """Verdicts on ``answers`` and ``exact_match`` of every cache, if both runs asked the same questions."""
    if not _same_questions(a, b):
        return {}
    first, second = Questions(a), Questions(b)
    out: dict[tuple[Any, ...], str] = {}
    for name in first.exact:
        common = [key for key in first.exact[name] if key in second.exact.get(name, {})]
        groups = {("answers", "", None): common}
        for task, length in dict.fromkeys(key[:2] for key in common):
            groups["exact_match", task, length] = [key for key in common if key[:2] == (task, length)]
        for group, keys in groups.items():
            if keys:
                raw, own = ([answers.exact[name][key] for key in keys] for answers in (first, second))
                test = paired_answers(raw, own, [key[:3] for key in keys])
                word = "same" if test.only_raw == test.only_this == 0 else verdict(test.difference, test.p)
                out[name, *group] = word
    return out


def _same_questions(a: Document, b: Document) -> bool:
    """Whether both runs asked the same questions, which depend on the seed, the text, the tokenizer and the sizes."""
    sizes = ("contexts", "questions")
    same_size = all(a["settings"]["size"][name] == b["settings"]["size"][name] for name in sizes)
    same = all(a["settings"][name] == b["settings"][name] for name in ("seed", "text"))
    return same and same_size and Questions(a).depths.items() & Questions(b).depths.items() != set()


def as_markdown(found: Comparison) -> str:
    """A table of every figure, and what differs between the runs."""
    lines = [f"# {found.a} and {found.b}", ""]
    lines += [f"- {name}: {_shown(a)} / {_shown(b)}" for name, (a, b) in found.settings.items()]
    lines += ["", table_line(["cache", "figure", found.a, found.b, "difference", f"{found.b} is"])]
    lines.append(table_line(["---", "---", "---:", "---:", "---:", "---"]))
    for line in found.lines:
        what = " ".join(str(x) for x in (line.metric, line.task, line.length or "") if x != "")
        numbers = f"{line.a:.6g}", f"{line.b:.6g}", f"{line.difference:+.4g}"
        lines.append(table_line([line.format, what, *numbers, line.verdict]))
    tests = f"tested in pairs (McNemar, bootstrap over contexts); {NOT_DISTINGUISHABLE}: p of 0.05 or more."
    lines += ["", f"Figures of only one run: {found.only_a} and {found.only_b}."]
    return "\n".join([*lines, f"Answers to the same questions are {tests}", ""])


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
