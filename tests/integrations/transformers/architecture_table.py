"""Runs every model class (or those named) and writes the outcomes as rows of JSON and as a page of the documentation.

Classes that already have a row in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

SCRIPT = "tests/integrations/transformers/architecture_table.py"
HEAD = """# Architectures

Outcome of packing keys and values for the generating classes of transformers {version} that the tests can build. The
command

`{command}`

writes this page, and `make test-slow` runs the same comparison. Any other outcome fails it.

| outcome | meaning |
| --- | --- |
| fused | matches the stock cache; attention runs on packed pages |
| decoded | matches the stock cache; the model's own attention and mask run on decoded keys and values |
| stock | matches the stock cache; the model has nothing to pack, and a warning says so |
| refused | raises a `SlimKVError` with the reason |

All models are tiny and have random weights. Pages are lossless (`krawfp32vrawfp32`), so any difference is an error.
Each model generates greedily for three left-padded sequences; tokens must be identical and logits within
{tolerance:g} of the largest. Each model runs with the cache alone and inside `slimkv.attention`; the table shows
the latter.

{summary}
"""


def state(row: dict[str, Any]) -> str:
    """One word for the outcome of a row."""
    results = {row["cache"]["result"], row["fused"]["result"]}
    if results != {"same"}:
        return "refused" if results == {"refused"} else "wrong"
    if row["fused"]["fused"]:
        return "fused"
    return "decoded" if row["cache"]["packed"] else "stock"


def page(rows: list[dict[str, Any]], command: str, tolerance: float) -> str:
    """The text of the documentation page."""
    ran = sorted((x for x in rows if not x["stock"]), key=lambda x: x["name"].lower())
    failed = sorted((x for x in rows if x["stock"]), key=lambda x: x["name"].lower())
    counts = Counter(map(state, ran))
    summary = f"{len(ran)} of {len(rows)} classes run with the stock cache from a tiny configuration: "
    summary += (
        ", ".join(f"{counts[x]} {x}" for x in ("fused", "decoded", "stock", "refused", "wrong") if counts[x]) + "."
    )
    text = HEAD.format(version=transformers.__version__, command=command, tolerance=tolerance, summary=summary)
    text += "\n| class | kind | outcome | packed layers | calls fused / decoded | why not |\n" + "| --- " * 6 + "|\n"
    for row in ran:
        fused = row["fused"]
        calls = f"{fused['fused']} / {fused['decoded']}" if fused["result"] == "same" else ""
        reason = (row["cache"]["detail"] or fused["detail"]).replace("|", "\\|")
        text += f"| {row['name']} | {row['kind']} | {state(row)} | {fused['packed'] or ''} | {calls} | {reason} |\n"
    text += "\n## Not compared\n\n"
    text += "Stock transformers cannot run these classes from the configuration that the test derives.\n\n"
    text += "| class | why |\n| --- | --- |\n"
    for row in failed:
        text += f"| {row['name']} | {row['stock'].replace('|', chr(92) + '|')} |\n"
    return text


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes to run; default: all")
    parser.add_argument("--rows", type=Path, required=True, help="outcomes, one JSON object per line")
    parser.add_argument("--page", type=Path, help="the document to write")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import outcomes

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    wanted = options.names or list(outcomes.classes())
    for name in wanted:
        if name not in rows:
            start = time.monotonic()
            rows[name] = outcomes.outcome(name).to_dict()
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
            print(f"{name}: {rows[name]['stock'] or state(rows[name])} ({time.monotonic() - start:.1f} s)", flush=True)
    if options.page:
        command = f"python {SCRIPT} --rows ROWS --page docs/guides/architectures.md"
        options.page.write_text(page([rows[x] for x in wanted], command, outcomes.TOLERANCE))


if __name__ == "__main__":
    main()
