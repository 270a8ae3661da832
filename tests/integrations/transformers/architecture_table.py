"""Runs every class (or those named) and writes what becomes of it, as rows of JSON and as a page.

Rows that are in the file already are not run again.
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
HEAD = """# Every architecture

What becomes of the generating classes of transformers {version} when their keys and values are packed. This page is
written by

`{command}`

and `make test-slow` runs the same comparison, which fails on any line that is not one of these:

| outcome | meaning |
| --- | --- |
| fused | the stock answer, with attention on packed pages |
| decoded | the stock answer, with decoded keys and values under the model's own attention and mask |
| stock | the stock answer; nothing in this model is packed, and a warning says so |
| refused | a `SlimKVError` that names the reason |

Every model is tiny and random; pages are lossless (`krawfp32vrawfp32`), so any difference is an error. Three sequences
with left padding, greedy: the same tokens, and logits within {tolerance:g} of the largest. Each is run with the cache
alone and inside `slimkv.attention`; the table shows the latter.

{summary}
"""


def state(row: dict[str, Any]) -> str:
    """One word for a row."""
    results = {row["cache"]["result"], row["fused"]["result"]}
    if results != {"same"}:
        return "refused" if results == {"refused"} else "wrong"
    if row["fused"]["fused"]:
        return "fused"
    return "decoded" if row["cache"]["packed"] else "stock"


def page(rows: list[dict[str, Any]], command: str, tolerance: float) -> str:
    """The document."""
    ran = sorted((x for x in rows if not x["stock"]), key=lambda x: x["name"].lower())
    failed = sorted((x for x in rows if x["stock"]), key=lambda x: x["name"].lower())
    counts = Counter(map(state, ran))
    summary = f"Of {len(rows)} classes, {len(ran)} run with the stock cache from a tiny configuration. Of these: "
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
    text += (
        "\n## Not compared\n\nStock transformers does not run these from the configuration that the test derives.\n\n"
    )
    text += "| class | why |\n| --- | --- |\n"
    for row in failed:
        text += f"| {row['name']} | {row['stock'].replace('|', chr(92) + '|')} |\n"
    return text


def main() -> None:
    """The command."""
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
