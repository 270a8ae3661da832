"""Serving through vLLM or SGLang: the same load on stock caches and on slimkv's, one engine after another."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimkv.errors import InputError
from slimkv.lab.bench.results import run_facts
from slimkv.lab.bench.serve_settings import DTYPES, ServeSettings, engine_plan, is_stock, write_model
from slimkv.lab.engine_process import environment, log_tail, run_plan
from slimkv.lab.report.charts import Bar, bars
from slimkv.lab.report.plots import write_plots


@dataclass(frozen=True)
class ServeReport:
    """``slimkv bench serve``: the figures of each system, and their ratios to ``bf16`` (``fp32``) if that ran."""

    settings: ServeSettings
    systems: dict[str, dict[str, Any]]
    over_bf16: dict[str, dict[str, float]]
    device: str
    versions: dict[str, str]
    date: str
    command: str


def bench_serve(settings: ServeSettings, step: Callable[[str], None], folder: Path | None = None) -> ServeReport:
    """Runs every system in a separate process; a failing system is reported with the end of its output.

    ``folder`` keeps each system's JSON and log.
    """
    with tempfile.TemporaryDirectory(prefix="slimkv-serve-") as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        model = Path(scratch, "model")
        write_model(model, settings.shape)
        systems = {}
        for system in settings.systems:
            step(f"{system}: starting")
            systems[system] = _run_system(engine_plan(system, settings, model), settings, kept, step)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return ServeReport(settings, systems, over_stock(systems), **run_facts(device))


def _run_system(
    plan: dict[str, Any], settings: ServeSettings, folder: Path, step: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of the phases, and ``error`` if the engine stopped early."""
    name, begin = plan["system"], time.monotonic()
    # Requests are greedy, so FlashInfer's sampler need not be compiled.
    env = environment(HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0") | plan["environment"]

    def tell(line: str) -> None:
        if line.startswith(f"{name}: "):
            step(line)

    module = "slimkv.lab.bench.serve_engine"
    result, error = run_plan(module, plan, folder / name, env, tell, settings.limit_seconds)
    if error is not None:
        result["error"] = f"{error}: {log_tail(folder / f'{name}.log')}"
        step(f"{name}: {result['error']}")
    return {"seconds": time.monotonic() - begin, **result}


class Figure(NamedTuple):
    """A figure of a system: its column in the table, its path in the result, and the name of its ratio to bf16.

    An empty column or ratio is left out.
    """

    column: str
    path: tuple[str, ...]
    format: str
    ratio: str = ""


FIGURES = (
    Figure("KV tokens", ("kv_tokens",), "{:,.0f}", "kv_tokens"),
    Figure("start s", ("start_seconds",), "{:.1f}"),
    Figure("prefill s", ("decode", "prefill_seconds"), "{:.2f}", "prefill_seconds"),
    Figure("all cached s", ("decode", "cached_seconds"), "{:.3f}", "cached_seconds"),
    Figure("decode tok/s", ("decode", "decode_tokens_per_second"), "{:,.0f}", "decode_tokens_per_second"),
    Figure("acceptance", ("decode", "acceptance_length"), "{:.2f}", "acceptance_length"),
    Figure("full: requests", ("full", "requests"), "{:.0f}", "full_requests"),
    Figure("full: tok/s", ("full", "decode_tokens_per_second"), "{:,.0f}", "full_tokens_per_second"),
    Figure("offload: recompute s", ("offload", "recompute_seconds"), "{:.3f}"),
    Figure("from host s", ("offload", "host_seconds"), "{:.3f}", "offload_host_seconds"),
    Figure("in cache s", ("offload", "cached_seconds"), "{:.3f}"),
    Figure("short: recompute s", ("offload", "short", "recompute_seconds"), "{:.3f}"),
    Figure("short: from host s", ("offload", "short", "host_seconds"), "{:.3f}", "offload_short_host_seconds"),
    Figure("", ("offload", "load_bytes"), "", "offload_load_bytes"),
    Figure("offload: copy s", ("offload", "load_seconds"), "{:.4f}", "offload_load_seconds"),
    Figure("sessions: hits", ("sessions", "hit_share"), "{:.1%}", "sessions_hit_share"),
    Figure("recomputed", ("sessions", "recomputed_tokens"), "{:,.0f}", "sessions_recomputed_tokens"),
    Figure(
        "sessions: TTFT p50 s", ("sessions", "time_to_first_token_p50"), "{:.3f}", "sessions_time_to_first_token_p50"
    ),
    Figure("TTFT p99 s", ("sessions", "time_to_first_token_p99"), "{:.3f}", "sessions_time_to_first_token_p99"),
    Figure("tok/s", ("sessions", "output_tokens_per_second"), "{:,.0f}", "sessions_output_tokens_per_second"),
    Figure("Poisson: TTFT p50 s", ("poisson", "time_to_first_token_p50"), "{:.3f}", "poisson_time_to_first_token_p50"),
    Figure("TTFT p99 s", ("poisson", "time_to_first_token_p99"), "{:.3f}", "poisson_time_to_first_token_p99"),
    Figure("TPOT p50 s", ("poisson", "time_per_output_token_p50"), "{:.4f}", "poisson_time_per_output_token_p50"),
    Figure("TPOT p99 s", ("poisson", "time_per_output_token_p99"), "{:.4f}", "poisson_time_per_output_token_p99"),
)


def over_stock(systems: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each system's figures relative to the unquantised cache in the same run (start-up: difference in seconds)."""
    stock = next((name for name in systems if name.partition(":")[0] in DTYPES.values()), None)
    if stock is None:
        return {}
    out: dict[str, dict[str, float]] = {}
    for name, system in systems.items():
        if name != stock:
            pairs = [(f.ratio, _at(system, f.path), _at(systems[stock], f.path)) for f in FIGURES if f.ratio]
            out[name] = {ratio: ours / theirs for ratio, ours, theirs in pairs if ours is not None and theirs}
            if "start_seconds" in system and "start_seconds" in systems[stock]:
                out[name]["start_seconds_more"] = system["start_seconds"] - systems[stock]["start_seconds"]
    return out


def _at(system: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = system
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def table_rows(report: ServeReport) -> list[list[str]]:
    """A header and a row per system; a dash for a missing figure; empty columns are left out."""
    found = report.systems
    columns = [
        figure for n, figure in enumerate(FIGURES)
        if figure.column and (n == 0 or any(_at(system, figure.path) is not None for system in found.values()))
    ]  # fmt: skip
    rows = [["cache", *(figure.column for figure in columns)]]
    for name, system in found.items():
        values = [(_at(system, figure.path), figure.format) for figure in columns]
        rows.append([name, *("-" if value is None else fmt.format(value) for value, fmt in values)])
    return rows


def notes(report: ServeReport) -> list[str]:
    """Lines below the table: the ratios, failures, and where it was measured."""
    stock = DTYPES[report.settings.dtype]
    lines = [
        f"{name} over {stock}: " + ", ".join(f"{label} {value:.2f}" for label, value in row.items())
        for name, row in report.over_bf16.items() if row
    ]  # fmt: skip
    for name, system in report.systems.items():
        if "error" in system:
            code, _, log = system["error"].partition(": ")  # the last line of the log says what went wrong
            lines.append(f"{name} failed: {code}: {(log.strip() or 'no output').splitlines()[-1]}")
    return [*lines, f"{report.device}, {report.date}", "  ".join(f"{k} {v}" for k, v in report.versions.items())]


def plot_sessions(report: ServeReport, path: Path) -> None:
    """The sessions phase as an SVG file: hit rate, time to first token and tokens per second of each system."""
    found = {name: x["sessions"] for name, x in report.systems.items() if "sessions" in x}
    if not found:
        raise InputError("a chart of sessions needs a system that finished the sessions phase")
    panels = [
        (f"prompt tokens found in a cache of {report.settings.held:.0%} of all sessions", "hit_share", "{:.0%}"),
        ("seconds to the first token, median", "time_to_first_token_p50", "{:.2f} s"),
        ("seconds to the first token, 99th percentile", "time_to_first_token_p99", "{:.2f} s"),
        ("tokens per second of all users", "output_tokens_per_second", "{:,.0f}"),
    ]
    drawn = [
        bars(caption, [Bar(name, x[key], fmt.format(x[key]), is_stock(name)) for name, x in found.items()])
        for caption, key, fmt in panels
        if any(x[key] > 0 for x in found.values())
    ]
    write_plots("Multi-turn sessions in less memory than they need", drawn, path)
