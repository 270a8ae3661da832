"""The ``slimkv bench`` commands: their options, and how their reports are printed.

Only the standard library is needed, so that a machine with nothing but torch can be measured. With rich, tables are
drawn; ``slimkv bench`` and ``python -m slimkv.lab.bench`` are the same commands.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimkv.errors import SlimKVError

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
    "prefill": "slimkv's arithmetic for passes of many new tokens: 16bit, 8bit, auto",
    "seed": "of prompts and arrivals",
    "limit_seconds": "for one system",
    "offload_gib": "host memory of the offload phase",
    "short_context": "tokens of a second prompt of the offload phase; 0: none",
    "rounds": "of the offload phase; the median counts",
}
GENERATE_OPTIONS = {
    "context": "tokens in the cache before decoding",
    "batch": "sequences",
    "new_tokens": "decode steps to time",
    "layers": "of the random-weight model",
    "rounds": "times each cache is timed; the median counts",
}


def main(arguments: list[str] | None = None, program: str = "python -m slimkv.lab.bench") -> int:
    """Runs one benchmark and prints it; returns the exit code."""
    parser = argparse.ArgumentParser(prog=program, description="Time slimkv beside the baselines that can run here.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="attend|store|generate|serve")
    _add_operation(
        commands, "attend", "attention on packed pages: decode, verification, prefill (small cells on a CPU)"
    )
    _add_operation(commands, "store", "writing K and V to packed pages: a prefill chunk, a decode step")
    _add_generate(commands)
    _add_serve(commands)
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    run: Callable[..., int] = given.pop("run")
    try:
        return run(given)
    except SlimKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _print(document: str, as_json: bool, output: Path | None, shown: Callable[[], None]) -> None:
    """The JSON document, or what a person reads; and the document to ``output``."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(document + "\n", encoding="utf-8")
    if as_json:
        print(document)
    else:
        shown()


def _add_common(parser: argparse.ArgumentParser, run: Callable[..., int], output: str = "--output") -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(output, type=Path, dest="output_file", help="write the JSON here as well")


def _add_operation(commands: Any, operation: str, what: str) -> None:
    parser = commands.add_parser(operation, help=what, description=what)
    parser.add_argument(
        "--cells", type=_comma_list, default=[], help="names or patterns, such as decode-*,prefill-*; default: all"
    )
    parser.add_argument("--backend", type=_comma_list, default=[], help="backends, such as cuda,triton")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--page", type=int, help="tokens per block; default: the cell's own")
    parser.add_argument("--no-baselines", action="store_true", help="time slimkv alone")
    parser.add_argument("--small", action="store_true", help="the small cells, even on a GPU")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    _add_common(parser, _operation)


def _operation(given: dict[str, Any]) -> int:
    from slimkv.lab.bench.attention import bench_attend
    from slimkv.lab.bench.options import Options, silent
    from slimkv.lab.bench.store import bench_store
    from slimkv.lab.bench.tables import show_report

    options = Options(
        given["cells"], given["backend"], given["device"], given["page"], not given["no_baselines"], given["small"]
    )
    bench = bench_attend if given["command"] == "attend" else bench_store
    report = bench(options, silent if given["quiet"] else _say)
    if given["plot"] is not None:
        from slimkv.lab.bench.plot import plot

        plot(report, given["plot"])
    _print(report.to_json(), given["json"], given["output_file"], lambda: show_report(report))
    return 0


def _add_generate(commands: Any) -> None:
    from slimkv.lab.bench.generate import GenerateSettings

    what = "decoding through transformers with a packed cache, and with DynamicCache, in one run"
    parser, base = commands.add_parser("generate", help=what, description=what), GenerateSettings()
    parser.add_argument("--model", help="a model; default: a Llama of random weights")
    parser.add_argument(
        "--format", dest="formats", type=_comma_list, default=list(base.formats), help="formats to time"
    )
    for name, help in GENERATE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(base, name), help=help)
    parser.add_argument("--dtype", default=base.dtype, help="bfloat16, float16 or float32")
    parser.add_argument("--device", default=base.device, help="cuda or cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    _add_common(parser, _generate)


def _generate(given: dict[str, Any]) -> int:
    import torch

    from slimkv.lab.bench.generate import GenerateSettings, time_generation
    from slimkv.lab.bench.tables import show_generation

    as_json, output, threads = given.pop("json"), given.pop("output_file"), given.pop("threads")
    del given["command"]
    if threads is not None:
        torch.set_num_threads(threads)
    report = time_generation(GenerateSettings(**{**given, "formats": tuple(given["formats"])}))
    _print(json.dumps(asdict(report), indent=2), as_json, output, lambda: show_generation(report))
    return 0


def _add_serve(commands: Any) -> None:
    from slimkv.lab.bench.serve import DTYPES, ENGINES, OFFLOAD, PHASES, ServeSettings
    from slimkv.lab.bench.serve_shapes import SHAPES

    what = "engines under load, stock caches beside slimkv's: tokens held, decoding, full memory, Poisson arrivals"
    parser, base = commands.add_parser("serve", help=what, description=what), ServeSettings()
    parser.add_argument("--engine", choices=list(ENGINES), default=base.engine, help="which engine")
    parser.add_argument(
        "--systems",
        type=_comma_list,
        default=list(base.systems),
        help="bf16,fp32,fp8,turboquant_*, or formats",
    )
    parser.add_argument(
        "--phases", type=_comma_list, default=list(base.phases), help=f"of {','.join((*PHASES, OFFLOAD))}"
    )
    parser.add_argument(
        "--shape", default=base.shape, help=f"of the model: {', '.join(SHAPES)}, or a config.json or its folder"
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default=base.dtype, help="of the model; float32 (system fp32) on most CPUs"
    )
    for name, help in SERVE_OPTIONS.items():
        default = getattr(base, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=help)
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--folder", type=Path, help="keep each system's JSON and log here")
    _add_common(parser, _serve, "--output-file")


def _serve(given: dict[str, Any]) -> int:
    from slimkv.lab.bench.serve import ServeSettings, bench_serve
    from slimkv.lab.bench.tables import show_serving
    from slimkv.lab.provenance import provenance

    as_json, output, folder = (given.pop(name) for name in ("json", "output_file", "folder"))
    del given["command"]
    settings = ServeSettings(**{**given, "systems": tuple(given["systems"]), "phases": tuple(given["phases"])})
    report = bench_serve(settings, _say, provenance().command, folder)
    _print(report.to_json(), as_json, output, lambda: show_serving(report))
    return 1 if any("error" in system for system in report.systems.values()) else 0
