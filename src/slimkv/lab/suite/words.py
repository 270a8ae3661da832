"""The results of a run's statistical tests, in sentences."""

from __future__ import annotations

from slimkv.lab.evals.harness import RAW
from slimkv.lab.suite.statistics import NOT_DISTINGUISHABLE
from slimkv.lab.suite.summary import Document


def words(document: Document) -> list[str]:
    """The results of the tests, and what was left out."""
    told = []
    for key, what in (("perplexity_test", "perplexity"), ("answers_test", "answers to the tasks")):
        tested = {row["format"]: row[key]["verdict"] for row in document["summary"]["rows"] if key in row}
        for word in dict.fromkeys(tested.values()):
            names = ", ".join(name for name, other in tested.items() if other == word)
            told.append(f"{what} of {names}: {word} {'from' if word == NOT_DISTINGUISHABLE else 'than'} {RAW}")
    for group in document["summary"]["groups"]:
        rows = {row["format"]: row for row in document["summary"]["rows"]}
        measured = [name for name in group if rows[name].get("kl") is not None]
        if len(measured) > 1:
            best = min(measured, key=lambda name: rows[name]["kl"])
            others = ", ".join(f"{n} {rows[n]['kl']:.4f}" for n in measured if n != best)
            size = rows[best]["bytes_per_token"]
            told.append(f"about {size:,.0f} bytes per token: {best} has the smallest KL divergence, "
                        f"{rows[best]['kl']:.4f} ({others})")  # fmt: skip
    return told + list(document["notes"])
