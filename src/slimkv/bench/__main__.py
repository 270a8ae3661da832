"""``python -m slimkv.bench``: the ``slimkv bench`` commands without typer, rich or matplotlib."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slimkv.bench.attend import bench_attend
from slimkv.bench.results import text_lines
from slimkv.bench.running import Options
from slimkv.bench.store import bench_store
from slimkv.errors import SlimKVError


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(arguments: list[str] | None = None) -> int:
    """Runs one benchmark and prints it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m slimkv.bench", description=__doc__)
    parser.add_argument("operation", choices=("attend", "store"))
    parser.add_argument("--cells", type=_words, default=[], help="names or patterns, such as decode-*,prefill-*")
    parser.add_argument("--impl", type=_words, default=[], help="implementations, such as triton,reference")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--page", type=int, help="tokens per page")
    parser.add_argument("--no-baselines", action="store_true", help="time slimkv alone")
    parser.add_argument("--small", action="store_true", help="small cells, even on a GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, help="write the JSON here as well")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    given = parser.parse_args(arguments)
    options = Options(given.cells, given.impl, given.device, given.page, not given.no_baselines, given.small)

    def step(message: str) -> None:
        if not given.quiet:
            print(message, file=sys.stderr, flush=True)

    try:
        report = {"attend": bench_attend, "store": bench_store}[given.operation](options, step)
    except SlimKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.output is not None:
        report.save(given.output)
    print(report.to_json() if given.json else "\n".join(text_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
