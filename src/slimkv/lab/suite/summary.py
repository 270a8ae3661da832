"""Summarises the parts of a run in one row per cache: bytes, tokens that fit, quality with tests, speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from slimkv.lab.evals.harness import RAW
from slimkv.lab.evals.statistics import NOT_DISTINGUISHABLE, PairedTest, holm, paired_answers, verdict, wilson

Document = dict[str, Any]
_EQUAL = 1.08  # largest ratio of bytes of caches that are compared as equal


class Column(NamedTuple):
    """A column of the table of caches: its title, the field of a row, and the field's format."""

    title: str
    key: str
    fmt: str
    is_test: bool = False  # ``fmt`` is for its difference

    def text(self, row: Document) -> str:
        """The cell as text; empty for a missing figure."""
        found: Any = row
        for name in self.key.split("."):
            found = (found or {}).get(name)
        if found is None or not self.is_test:
            return "" if found is None else self.fmt.format(found)
        sure = "" if found["verdict"] == NOT_DISTINGUISHABLE else f" (p {found['p_corrected']:.2g})"
        return f"{self.fmt.format(found['difference'])}, {found['verdict']}{sure}"


SHOWN = (
    Column("bytes/token", "bytes_per_token", "{:,.0f}"),
    Column("tokens that fit", "tokens_fit", "{:,}"),
    Column("KL", "kl", "{:.4f}"),
    Column("same next token", "top1", "{:.1%}"),
    Column("perplexity", "perplexity", "{:.3f}"),
    Column("over raw", "perplexity_test", "{:+.2%}", is_test=True),
    Column("answers", "answers", "{0[value]:.1%} ({0[low]:.0%} to {0[high]:.0%})"),
    Column("against raw", "answers_test", "{:+.1%}", is_test=True),
    Column("needles", "needle", "{0[found]}/{0[tried]}"),
    Column("drafts accepted", "drafts.acceptance_length", "{:.2f}"),
    Column("decode tokens/s", "decode.tokens_per_second", "{:.1f}"),
)


def parts_of(document: Document, kind: str) -> list[Document]:
    """The data of the finished parts of a kind."""
    return [part["data"] for part in document["parts"] if part["kind"] == kind and part["data"] is not None]


def first_part(document: Document, kind: str) -> Document | None:
    """The data of the first finished part of a kind, or None."""
    return next(iter(parts_of(document, kind)), None)


def summarise(document: Document) -> Document:
    """The rows by cache and by task, and groups of caches of equal size."""
    rows: dict[str, Document] = {name: {"format": name} for name in document["formats"]}
    for name, plan in (first_part(document, "memory") or {"formats": {}})["formats"].items():
        if name in rows:
            rows[name] |= {"bytes_per_token": plan["bytes_per_token"], "smaller": plan["ratio_to_bf16"]}
            rows[name] |= {"bits": plan["bits_per_number"], "tokens_fit": plan["tokens_per_sequence"]}
    _add_agreement(document, rows)
    _add_needle(document, rows)
    questions = Questions(document)
    _add_answers(questions, rows)
    _add_speed(document, rows)
    _add_lm_eval(document, rows)
    return {"rows": list(rows.values()), "tasks": questions.table(), "groups": equal_bytes(list(rows.values()))}


def equal_bytes(rows: Sequence[Document]) -> list[list[str]]:
    """Groups of cache names of about equal bytes, the largest first."""
    sized = sorted((row for row in rows if row.get("bytes_per_token")), key=lambda row: -row["bytes_per_token"])
    groups: list[list[Document]] = []
    for row in sized:
        if groups and groups[-1][0]["bytes_per_token"] / row["bytes_per_token"] < _EQUAL:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [[row["format"] for row in group] for group in groups]


def _tested(rows: dict[str, Document], key: str, tests: dict[str, PairedTest], higher_is_better: bool) -> None:
    """Adds the tests to the rows, with p-values corrected for their number, and the verdicts."""
    for (name, test), p in zip(tests.items(), holm([test.p for test in tests.values()]), strict=True):
        words = verdict(test.difference, p, higher_is_better)
        rows[name][key] = {**asdict(test), "p_corrected": p, "verdict": words}


def _add_agreement(document: Document, rows: dict[str, Document]) -> None:
    found = first_part(document, "agreement")
    if found is None:
        return
    rows[RAW]["perplexity"] = found["raw_perplexity"]
    for row in found["rows"]:
        into = rows[row["format"]]
        into.update({key: row[key] for key in ("perplexity", "over_raw", "kl", "kl_99", "top1")})
    figures = ("over_raw", "over_raw_low", "over_raw_high", "over_raw_p")
    tests = {row["format"]: PairedTest(*(row[name] for name in figures)) for row in found["rows"]}
    _tested(rows, "perplexity_test", tests, higher_is_better=False)


def _add_needle(document: Document, rows: dict[str, Document]) -> None:
    cells = [cell for part in parts_of(document, "needle") for cell in part["cells"]]
    for name, row in rows.items():
        own = [cell for cell in cells if cell["format"] == name]
        if own:
            found, tried = sum(c["found"] for c in own), sum(c["tried"] for c in own)
            row["needle"] = {"found": found, "tried": tried, **asdict(wilson(found, tried))}


class Questions:
    """Answers to the synthetic tasks, from one part for each task or one for each format."""

    def __init__(self, document: Document) -> None:
        self.exact: dict[str, dict[tuple[Any, ...], bool]] = {}
        self.depths: dict[tuple[Any, ...], float] = {}
        for part in parts_of(document, "tasks"):
            keys = [(i["task"], i["length"], i["context"], i["question"]) for i in part["items"]]
            self.depths.update(zip(keys, (item["depth"] for item in part["items"]), strict=True))
            for name, answers in part["answers"].items():
                self.exact.setdefault(name, {}).update(zip(keys, answers["exact"], strict=True))

    def test(self, name: str, keys: Iterable[tuple[Any, ...]]) -> PairedTest | None:
        """A cache compared with the stock cache on the questions ``keys`` that both have answered."""
        both = [key for key in keys if key in self.exact.get(RAW, {}) and key in self.exact[name]]
        if not both:
            return None
        raw, own = self.exact[RAW], self.exact[name]
        return paired_answers([raw[k] for k in both], [own[k] for k in both], [k[:3] for k in both])

    def table(self) -> list[Document]:
        """A row for every cache, task and length, with Wilson's interval and the paired test."""
        out = []
        for name, answers in self.exact.items():
            for task, length in dict.fromkeys(key[:2] for key in answers):
                keys = [key for key in answers if key[:2] == (task, length)]
                right = sum(answers[key] for key in keys)
                row = {"format": name, "task": task, "length": length, "right": right, "asked": len(keys)}
                row |= asdict(wilson(right, len(keys)))
                test = self.test(name, keys) if name != RAW else None
                if test is not None:
                    row["test"] = {**asdict(test), "verdict": verdict(test.difference, test.p)}
                out.append(row)
        return out


def _add_answers(questions: Questions, rows: dict[str, Document]) -> None:
    tests = {}
    for name, answers in questions.exact.items():
        right = sum(answers.values())
        rows[name]["answers"] = {"right": right, "asked": len(answers), **asdict(wilson(right, len(answers)))}
        test = questions.test(name, answers) if name != RAW else None
        if test is not None:
            tests[name] = test
    _tested(rows, "answers_test", tests, higher_is_better=True)


def _add_speed(document: Document, rows: dict[str, Document]) -> None:
    """Acceptance of drafts, and the speed of decoding."""
    kept = (
        ("drafts", "format", "drafts", ("acceptance_length", "over_raw")),
        (
            "generate",
            "cache",
            "decode",
            ("tokens_per_second", "over_stock", "milliseconds_per_step", "prefill_seconds"),
        ),
    )
    for kind, name, key, figures in kept:
        for row in (first_part(document, kind) or {"rows": []})["rows"]:
            into = RAW if row[name] == "DynamicCache" else row[name]
            if into in rows:
                rows[into][key] = {figure: row[figure] for figure in figures}


def _add_lm_eval(document: Document, rows: dict[str, Document]) -> None:
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    for part in parts_of(document, "lm-eval"):
        rows[part["format"]]["lm_eval"] = part["results"]
        samples[part["format"]] = part["samples"]
    raw = samples.get(RAW, {})
    for name, tasks in samples.items():
        if name == RAW:
            continue
        found = {}
        for task, metrics in tasks.items():
            for metric, values in metrics.items():
                base = raw.get(task, {}).get(metric)
                if base is None or len(base) != len(values) or not set(values) | set(base) <= {0.0, 1.0}:
                    continue
                test = paired_answers([x > 0 for x in base], [x > 0 for x in values], range(len(values)))
                found[f"{task}/{metric}"] = {**asdict(test), "verdict": verdict(test.difference, test.p)}
        rows[name]["lm_eval_tests"] = found


def words(document: Document) -> list[str]:
    """The results of the statistical tests in sentences, and what was left out."""
    sentences = []
    for key, what in (("perplexity_test", "perplexity"), ("answers_test", "answers to the tasks")):
        tested = {row["format"]: row[key]["verdict"] for row in document["summary"]["rows"] if key in row}
        for word in dict.fromkeys(tested.values()):
            names = ", ".join(name for name, other in tested.items() if other == word)
            sentences.append(f"{what} of {names}: {word} {'from' if word == NOT_DISTINGUISHABLE else 'than'} {RAW}")
    for group in document["summary"]["groups"]:
        rows = {row["format"]: row for row in document["summary"]["rows"]}
        measured = [name for name in group if rows[name].get("kl") is not None]
        if len(measured) > 1:
            best = min(measured, key=lambda name: rows[name]["kl"])
            others = ", ".join(f"{n} {rows[n]['kl']:.4f}" for n in measured if n != best)
            size = rows[best]["bytes_per_token"]
            sentences.append(f"about {size:,.0f} bytes per token: {best} has the smallest KL divergence, "
                        f"{rows[best]['kl']:.4f} ({others})")  # fmt: skip
    return sentences + list(document["notes"])
