"""Serving through vLLM or SGLang: the same load on stock caches and on slimkv's, one engine after another.

Every engine gets the same share of the device's memory, a model of one shape with dummy weights and random tokens.
Systems are ``bf16``, ``fp8`` and vLLM's other cache dtypes, and slimkv's format names (``k4v4``, or ``k4v4:triton`` for
one implementation); ``bf16:FLASHMLA`` names the stock attention backend, ``k4v4@LBHNC`` the memory layout as well.
``k4v4+host`` has host memory behind it, ``bf16+cold`` host memory that packs what it holds as ``k4v4``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError
from slimkv.lab.bench.results import run_facts
from slimkv.lab.bench.serve_shapes import shape_config, text_field
from slimkv.lab.bench.sessions import SHARED, session_bytes
from slimkv.memory_plan import shape_of
from slimkv.spec import parse_spec

PHASES = ("decode", "full", "poisson")
ENGINES = ("vllm", "sglang")
OFFLOAD = "offload"  # only on request, because it needs host memory
SESSIONS = "sessions"  # only on request, because its cache is a share of the memory that holds all sessions
COLD = "slimkv.integrations.vllm.cold"  # the module of the tier that packs blocks of a stock cache
COLD_FORMAT = "k4v4"
_STOCK = {
    "vllm": {"bf16": "auto", "fp32": "auto", "fp8": "fp8"},
    "sglang": {"bf16": "auto", "fp32": "auto", "fp8": "fp8_e4m3"},
}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}  # dtype of the model, and the system with an unquantised cache
NGRAMS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}  # tokens that are looked for in the text
_SGLANG_PAGE = 64


@dataclass(frozen=True)
class ServeSettings:
    """The model and the load."""

    engine: str = "vllm"
    systems: tuple[str, ...] = ("bf16", "fp8", "k4v4")
    phases: tuple[str, ...] = PHASES
    shape: str = "llama-3.1-8b"
    dtype: str = "bfloat16"  # of the model; float32 for CPUs without bf16
    requests: int = 16  # of the decode phase
    context: int = 16384
    output: int = 96
    most_requests: int = 0  # of the full phase; 0: as many as the cache holds
    arrivals: int = 80
    rate: float = 5.0  # arrivals per second
    memory: float = 0.85  # share of the device's memory
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill: str = AUTO  # arithmetic of slimkv's passes over many new tokens
    drafts: int = 0  # tokens that n-grams of the text draft for each step; 0: none
    eager: bool = False  # without torch.compile and CUDA graphs
    seed: int = 0
    limit_seconds: int = 600  # for one system
    offload_gib: float = 40.0  # host memory of the offload phase
    short_context: int = 0  # of a second prompt of the offload phase; 0: none
    rounds: int = 5  # of the offload phase
    users: int = 32  # of the sessions phase
    turns: int = 4  # of each user
    think: float = 4.0  # mean seconds between an answer and the next turn
    held: float = 0.2  # share of the bf16 bytes of all sessions that the cache gets
    extra: tuple[tuple[str, Any], ...] = ()  # further engine arguments

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(f"unknown engine {self.engine!r}; known are {', '.join(ENGINES)}")
        shape_config(self.shape)  # raises with the known shapes
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        for name, system in DTYPES.items():
            if name != self.dtype and any(x.partition(":")[0] == system for x in self.systems):
                raise InputError(f"the system {system} needs dtype {name}, not {self.dtype}")
        for phase in self.phases:
            if phase not in (*PHASES, OFFLOAD, SESSIONS):
                raise InputError(f"unknown phase {phase!r}; known are {', '.join((*PHASES, OFFLOAD, SESSIONS))}")
        for name in (
            "requests", "context", "output", "arrivals", "max_num_seqs", "max_num_batched_tokens", "rounds", "users",
            "turns",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.short_context <= self.context:
            raise InputError(f"short_context must be 0 to {self.context}, the context; not {self.short_context}")
        if self.output < 2:
            raise InputError(f"output must be at least 2 tokens for a time between tokens, not {self.output}")
        for name in ("rate", "think", "held"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}")
        own = {OFFLOAD, SESSIONS} & set(self.phases) or any(mark in x for x in self.systems for mark in "@+")
        if self.engine == "sglang" and own:
            raise InputError(
                f"the phases {OFFLOAD} and {SESSIONS}, memory layouts (@) and tiers (+) are vLLM's; leave them out "
                "with SGLang"
            )
        if SESSIONS in self.phases:
            if self.context * SHARED / self.turns < self.output + 1:
                raise InputError(
                    f"{self.turns} turns of {self.output} new tokens leave no room in {self.context} tokens"
                )
            shape_of(shape_config(self.shape))  # raises where a token's bytes are not known
        KVCacheConfig(prefill=self.prefill)  # raises with the known values
        for system in self.systems:
            cache_arguments(system, self.engine, self.prefill)
            tier_arguments(system, self.offload_gib)


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

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(asdict(self), indent=2)


def cache_arguments(system: str, engine: str = "vllm", prefill: str = AUTO) -> dict[str, Any]:
    """Engine arguments of a system's cache: a stock cache dtype by its name, or a format of slimkv.

    ``k4v4:triton`` is a format with one implementation of store and attend, ``bf16:FLASHMLA`` a stock cache with one
    of the engine's own attention backends.
    """
    system, stock = system.partition("@")[0].partition("+")[0], _STOCK[engine]
    format, _, backend = system.partition(":")
    if format in stock or (engine == "vllm" and format.startswith("turboquant_")):
        cache = {"kv_cache_dtype": stock.get(format, format)}
        backend = backend or ("" if engine == "vllm" else _sglang_attention())
        return {**cache, "attention_backend": backend} if backend else cache
    parse_spec(format, 64)  # raises with the known formats
    config = {"slimkv": {"format": format}}
    if backend:
        config["slimkv"]["backend"] = backend
    if prefill != AUTO:
        config["slimkv"]["prefill"] = prefill
    if engine == "vllm":
        return {"attention_backend": "CUSTOM", "additional_config": config}
    return {
        "attention_backend": "slimkv", "page_size": _SGLANG_PAGE, "json_model_override_args": json.dumps(config),
    }  # fmt: skip


def tier_arguments(system: str, gib: float) -> dict[str, Any]:
    """vLLM's arguments of what is behind a system's cache: ``+host`` or ``+cold`` memory, or nothing."""
    tier = system.partition("@")[0].partition("+")[2]
    if tier not in ("", "host", "cold"):
        raise InputError(f"the system {system!r} names a tier {tier!r}; known are +host and +cold")
    if tier == "host":
        return {"kv_offloading_size": gib, "kv_offloading_backend": "native"}
    if tier == "cold":
        if importlib.util.find_spec(COLD) is None:
            raise InputError(f"the system {system!r} needs {COLD}, which this slimkv does not have: leave it out")
        extra = {
            "spec_name": "SlimKVOffloadingSpec", "spec_module_path": COLD, "slimkv": COLD_FORMAT,
            "cpu_bytes_to_use": int(gib * 2**30),
        }  # fmt: skip
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {"kv_transfer_config": connector}
    return {}


def _sglang_attention() -> str:
    """SGLang's fastest attention backend on this machine."""
    if not torch.cuda.is_available():
        return "torch_native"
    return "fa3" if torch.cuda.get_device_capability()[0] == 9 else "flashinfer"


def write_model(folder: Path, shape: str) -> None:
    """A folder with only a configuration; the engine creates dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_config(shape), indent=2))


def engine_plan(system: str, settings: ServeSettings, folder: Path) -> dict[str, Any]:
    """What ``serve_engine`` runs."""
    shape = shape_config(settings.shape)
    longest = min(settings.context + settings.output + 64, text_field(shape, "max_position_embeddings"))
    own = _vllm_arguments if settings.engine == "vllm" else _sglang_arguments
    layout = system.partition("@")[2]
    tier = "+host" if OFFLOAD in settings.phases and "+" not in system else system
    return {
        "engine": settings.engine,
        "system": system,
        "environment": {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {},
        "arguments": {
            **own(settings, str(folder), longest), **cache_arguments(system, settings.engine, settings.prefill),
            **tier_arguments(tier, settings.offload_gib), **dict(settings.extra),
        },
        "vocabulary": text_field(shape, "vocab_size"),
        **{name: getattr(settings, name) for name in
           ("phases", "requests", "context", "output", "most_requests", "arrivals", "rate", "seed", "rounds",
            "short_context", "max_num_seqs", "users", "turns", "think")},
    }  # fmt: skip


def _vllm_arguments(settings: ServeSettings, model: str, longest: int) -> dict[str, Any]:
    sized: dict[str, Any] = {}
    if SESSIONS in settings.phases:
        sized["kv_cache_memory_bytes"] = session_bytes(settings, shape_of(shape_config(settings.shape)))
    return {
        "model": model, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": settings.dtype,
        "max_model_len": longest, "gpu_memory_utilization": settings.memory, "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens, "enforce_eager": settings.eager,
        "enable_prefix_caching": True, "disable_log_stats": False, "seed": settings.seed, **sized,
        **({"speculative_config": {"method": "ngram", "num_speculative_tokens": settings.drafts, **NGRAMS}}
           if settings.drafts else {}),
    }  # fmt: skip


def _sglang_arguments(settings: ServeSettings, model: str, longest: int) -> dict[str, Any]:
    """Prefill runs without graphs, whose capture dominates SGLang's start-up; metrics provide times per request."""
    return {
        "model_path": model, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": settings.dtype,
        "context_length": longest, "mem_fraction_static": settings.memory,
        "max_running_requests": settings.max_num_seqs, "cuda_graph_max_bs_decode": settings.max_num_seqs,
        "chunked_prefill_size": settings.max_num_batched_tokens, "disable_cuda_graph": settings.eager,
        "disable_prefill_cuda_graph": True, "enable_metrics": True, "random_seed": settings.seed,
        "log_level": "warning",
        **({
            "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": settings.drafts + 1,
            "speculative_ngram_max_bfs_breadth": 1,
        } if settings.drafts else {}),
    }  # fmt: skip


def bench_serve(
    settings: ServeSettings, step: Callable[[str], None], command: str, folder: Path | None = None
) -> ServeReport:
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
    return ServeReport(settings, systems, over_stock(systems), **run_facts(device, command))


def _run_system(
    plan: dict[str, Any], settings: ServeSettings, folder: Path, step: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of the phases, and ``error`` if the engine stopped early."""
    name = plan["system"]
    target, request, log = (folder / f"{name}.{end}" for end in ("json", "plan.json", "log"))
    target.unlink(missing_ok=True)
    request.write_text(json.dumps(plan, indent=2))
    command = [sys.executable, "-u", "-m", "slimkv.lab.bench.serve_engine", str(request), str(target)]
    environment = {**_environment(), **plan["environment"]}
    begin = time.monotonic()
    with (
        _ends_when_asked(),
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment) as process,
    ):
        error, shown = None, 0
        try:
            while process.poll() is None:
                time.sleep(0.2)
                shown = _show_progress(log, name, shown, step)
                if time.monotonic() - begin > settings.limit_seconds:
                    error = f"stopped after {settings.limit_seconds} s"
                    break
            _show_progress(log, name, shown, step)
            if error is None and process.returncode:
                error = f"exit code {process.returncode}"
        finally:  # also the engine's child processes, which would hold memory of the next system
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    result = json.loads(target.read_text()) if target.is_file() else {}
    if error is not None:
        tail = log.read_text(errors="replace")[-3000:]
        step(f"{name}: {error}\n{tail}")
        result["error"] = f"{error}: {tail}"
    return {"seconds": time.monotonic() - begin, **result}


def _show_progress(log: Path, system: str, shown: int, step: Callable[[str], None]) -> int:
    """Prints the progress lines of the engine process after the first ``shown`` bytes."""
    with log.open("rb") as file:
        file.seek(shown)
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        if not line.endswith(b"\n"):
            break
        shown += len(line)
        if line.startswith(f"{system}: ".encode()):
            step(line.decode(errors="replace").rstrip())
    return shown


def _environment() -> dict[str, str]:
    """The environment of an engine's process. Requests are greedy, so FlashInfer's sampler need not be compiled."""
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**ours, "PYTHONUNBUFFERED": "1", **os.environ}


@contextmanager
def _ends_when_asked() -> Iterator[None]:
    """On SIGTERM (for example from a time limit), also ends the engine, which runs in its own session."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Figure(NamedTuple):
    """A figure of a system: its column in the table, where it is, and its name among ratios to the unquantised cache.

    Without a column or a ratio where that is empty.
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
    Figure("held", ("full", "requests"), "{:.0f}", "full_requests"),
    Figure("full tok/s", ("full", "decode_tokens_per_second"), "{:,.0f}", "full_tokens_per_second"),
    Figure("recompute s", ("offload", "recompute_seconds"), "{:.3f}"),
    Figure("from host s", ("offload", "host_seconds"), "{:.3f}", "offload_host_seconds"),
    Figure("in cache s", ("offload", "cached_seconds"), "{:.3f}"),
    Figure("short: recompute s", ("offload", "short", "recompute_seconds"), "{:.3f}"),
    Figure("from host s", ("offload", "short", "host_seconds"), "{:.3f}", "offload_short_host_seconds"),
    Figure("", ("offload", "load_bytes"), "", "offload_load_bytes"),
    Figure("copy s", ("offload", "load_seconds"), "{:.4f}", "offload_load_seconds"),
    Figure("hits", ("sessions", "hit_share"), "{:.1%}", "sessions_hit_share"),
    Figure("recomputed", ("sessions", "recomputed_tokens"), "{:,.0f}", "sessions_recomputed_tokens"),
    *(
        Figure(column, (phase, name), shape, f"{phase}_{name}")
        for column, phase, name, shape in (
            ("sessions: TTFT p50 s", "sessions", "time_to_first_token_p50", "{:.3f}"),
            ("TTFT p99 s", "sessions", "time_to_first_token_p99", "{:.3f}"),
            ("tok/s", "sessions", "output_tokens_per_second", "{:,.0f}"),
            ("TTFT p50 s", "poisson", "time_to_first_token_p50", "{:.3f}"),
            ("TTFT p99 s", "poisson", "time_to_first_token_p99", "{:.3f}"),
            ("TPOT p50 s", "poisson", "time_per_output_token_p50", "{:.4f}"),
            ("TPOT p99 s", "poisson", "time_per_output_token_p99", "{:.4f}"),
        )
    ),
)


def over_stock(systems: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each system's figures relative to the unquantised cache in the same run (start-up: difference in seconds)."""
    stock = next((name for name in systems if name.partition(":")[0] in DTYPES.values()), "")
    base = systems.get(stock)
    if base is None:
        return {}
    out: dict[str, dict[str, float]] = {}
    for name, system in systems.items():
        if name == stock:
            continue
        row = {}
        for figure in FIGURES:
            ours, theirs = _at(system, figure.path), _at(base, figure.path)
            if figure.ratio and ours is not None and theirs:
                row[figure.ratio] = ours / theirs
        if "start_seconds" in system and "start_seconds" in base:
            row["start_seconds_more"] = system["start_seconds"] - base["start_seconds"]
        out[name] = row
    return out


def _at(system: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = system
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def table_rows(report: ServeReport) -> list[list[str]]:
    """A header and a row per system; a dash for a missing figure; empty columns are left out."""
    columns = [figure for figure in FIGURES if figure.column]
    rows = [["cache", *(figure.column for figure in columns)]]
    for name, system in report.systems.items():
        values = [(_at(system, figure.path), figure.format) for figure in columns]
        rows.append([name, *("-" if value is None else fmt.format(value) for value, fmt in values)])
    measured = [i for i in range(len(rows[0])) if i < 2 or any(row[i] != "-" for row in rows[1:])]
    return [[row[i] for i in measured] for row in rows]


def notes(report: ServeReport) -> list[str]:
    """Lines below the table: the ratios, failures, and where it was measured."""
    lines = []
    for name, row in report.over_bf16.items():
        stock = DTYPES[report.settings.dtype]
        lines.append(f"{name} over {stock}: " + ", ".join(f"{label} {value:.2f}" for label, value in row.items()))
    lines += [f"{name} failed: {s['error'].splitlines()[0]}" for name, s in report.systems.items() if "error" in s]
    return [*lines, f"{report.device}, {report.date}", "  ".join(f"{k} {v}" for k, v in report.versions.items())]
