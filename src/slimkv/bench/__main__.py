"""``python -m slimkv.bench``: the ``slimkv bench`` commands without typer, rich or matplotlib."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from slimkv.bench.attention import bench_attend
from slimkv.bench.options import Options
from slimkv.bench.results import text_lines
from slimkv.bench.store import bench_store
from slimkv.errors import SlimKVError


def _words(text: str) -> list[str]:
    return [format for format in text.split(",") if format]


def _serve(arguments: list[str]) -> int:
    """``python -m slimkv.bench serve``: engines under load, with options of its own."""
    from slimkv.bench.serve import PHASES, SHAPES, ServeSettings, bench_serve, text_lines

    base = ServeSettings()
    parser = argparse.ArgumentParser(prog="python -m slimkv.bench serve", description=_serve.__doc__)
    parser.add_argument("--systems", type=_words, default=list(base.systems), help="bf16,fp8,turboquant_*, formats")
    parser.add_argument("--phases", type=_words, default=list(base.phases), help=f"of {','.join(PHASES)}")
    parser.add_argument("--shape", choices=list(SHAPES), default=base.shape, help="of the model")
    for name, what in SERVE_OPTIONS.items():
        kind, default = type(getattr(base, name)), getattr(base, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=what)
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output-file", type=Path, help="write the JSON here as well")
    parser.add_argument("--folder", type=Path, help="keep each system's JSON and log here")
    given = vars(parser.parse_args(arguments))
    as_json, output, folder = (given.pop(name) for name in ("json", "output_file", "folder"))
    command = " ".join(["slimkv bench serve", *arguments])
    settings = ServeSettings(**{**given, "systems": tuple(given["systems"]), "phases": tuple(given["phases"])})
    report = bench_serve(settings, lambda line: print(line, file=sys.stderr, flush=True), command, folder)
    if output is not None:
        report.save(output)
    print(report.to_json() if as_json else "\n".join(text_lines(report)))
    return 1 if any("error" in system for system in report.systems.values()) else 0


def _generate(arguments: list[str]) -> int:
    """``python -m slimkv.bench generate``: decoding through transformers, with options of its own."""
    from slimkv.bench.generate import GenerateSettings, text_lines, time_generation

    base = GenerateSettings()
    parser = argparse.ArgumentParser(prog="python -m slimkv.bench generate", description=_generate.__doc__)
    parser.add_argument("--model", help="a model; default: a Llama of random weights")
    parser.add_argument("--format", dest="formats", type=_words, default=list(base.formats), help="formats to time")
    for name in ("context", "batch", "new_tokens", "layers", "rounds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(base, name))
    parser.add_argument("--dtype", default=base.dtype)
    parser.add_argument("--device", default=base.device)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, help="write the JSON here as well")
    given = vars(parser.parse_args(arguments))
    as_json, output = given.pop("json"), given.pop("output")
    report = time_generation(GenerateSettings(**{**given, "formats": tuple(given["formats"])}))
    document = json.dumps(asdict(report), indent=2)
    if output is not None:
        output.write_text(document + "\n")
    print(document if as_json else "\n".join(text_lines(report)))
    return 0


_OWN_OPTIONS = {"serve": _serve, "generate": _generate}
SERVE_OPTIONS = {
    "requests": "requests of the decode phase",
    "context": "tokens of their prompts",
    "output": "tokens each of them gets",
    "most_requests": "bound of the full phase; 0: what the cache holds",
    "arrivals": "requests of the Poisson phase",
    "rate": "arrivals per second",
    "memory": "share of the device's memory for each engine",
    "max_num_seqs": "requests an engine runs at once",
    "max_num_batched_tokens": "tokens of a step",
    "seed": "of prompts and arrivals",
    "limit_seconds": "for one system",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one benchmark and prints it; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _OWN_OPTIONS:
        try:
            return _OWN_OPTIONS[arguments[0]](arguments[1:])
        except SlimKVError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    parser = argparse.ArgumentParser(prog="python -m slimkv.bench", description=__doc__)
    parser.add_argument("operation", choices=("attend", "store", *_OWN_OPTIONS))
    parser.add_argument("--cells", type=_words, default=[], help="names or patterns, such as decode-*,prefill-*")
    parser.add_argument("--backend", type=_words, default=[], help="implementations, such as triton,reference")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--page", type=int, help="tokens per page")
    parser.add_argument("--no-baselines", action="store_true", help="time slimkv alone")
    parser.add_argument("--small", action="store_true", help="small cells, even on a GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, help="write the JSON here as well")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    given = parser.parse_args(arguments)
    options = Options(given.cells, given.backend, given.device, given.page, not given.no_baselines, given.small)

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
