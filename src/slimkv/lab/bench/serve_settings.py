"""What ``slimkv bench serve`` runs: its settings, and the arguments of the engines.

Every engine gets the same share of the device's memory, the same model shape with dummy weights, and random tokens.
Systems are ``bf16``, ``fp8`` and vLLM's other cache dtypes, and slimkv's format names (``k4v4``, or ``k4v4:triton`` for
one implementation). ``bf16:FLASHMLA`` selects a stock attention backend, ``k4v4@LBHNC`` one of vLLM's cache layouts.
``k4v4+host`` offloads to host memory; ``bf16+cold`` offloads to host memory and packs blocks there as ``k4v4``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError
from slimkv.lab.bench.sessions import SHARED, session_bytes
from slimkv.lab.settings import check_limits, setting
from slimkv.memory_plan import shape_of
from slimkv.paths import read_json
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
NGRAMS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}  # sizes of the n-grams by which drafts are looked up
_SGLANG_PAGE = 64
# Weights are dummies, so a shape needs only what determines the work and the cache: layers, heads, windows, experts.
SHAPES: dict[str, dict[str, Any]] = json.loads(
    resources.files("slimkv.lab.bench").joinpath("shapes.json").read_text(encoding="utf-8")
)


def shape_config(shape: str) -> dict[str, Any]:
    """The configuration of a shape: one of ``SHAPES``, or a ``config.json`` (or the folder it is in)."""
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"unknown shape {shape!r}; known are {', '.join(SHAPES)}, or give a model's config.json or its folder"
        )
    config = read_json(file)
    if not isinstance(config, dict) or not config.get("architectures"):
        raise InputError(f"{file} does not name an architecture, as a model's configuration does")
    return config


def text_field(config: dict[str, Any], name: str) -> int:
    """A field of the text model, which composite models keep in a nested configuration."""
    nested = (config.get(part) or {} for part in ("text_config", "llm_config", "language_config"))
    found = next((part[name] for part in (config, *nested) if part.get(name)), None)
    if found is None:
        raise InputError(f"the configuration of {config['architectures'][0]} has no {name}")
    return int(found)


@dataclass(frozen=True)
class ServeSettings:
    """The model and the load."""

    engine: str = setting("vllm", "Engine", known=ENGINES)
    systems: tuple[str, ...] = setting(
        ("bf16", "fp8", "k4v4"), "Caches to compare: bf16, fp32, fp8, turboquant_*, formats of slimkv; +host, +cold."
    )
    phases: tuple[str, ...] = setting(PHASES, "Phases", known=(*PHASES, OFFLOAD, SESSIONS))
    shape: str = setting("llama-3.1-8b", "Model shape: llama-3.1-8b, qwen2.5-7b, ..., or a config.json or its folder.")
    dtype: str = setting("bfloat16", "Data type of the model, float32 on most CPUs", known=tuple(DTYPES))
    requests: int = setting(16, "Requests of the decode phase.", least=1)
    context: int = setting(16384, "Tokens of each prompt.", least=1)
    new_tokens: int = setting(96, "Tokens generated for each request.", least=2)
    most_requests: int = setting(0, "Maximum requests of the full phase; 0: as many as the cache holds.", least=0)
    arrivals: int = setting(80, "Requests of the Poisson phase.", least=1)
    rate: float = setting(5.0, "Arrivals per second.", positive=True)
    memory: float = setting(0.85, "Fraction of the device's memory for each engine.", positive=True, most=1)
    cache_gib: float = setting(0.0, "GiB of each vLLM engine's cache, to share a GPU; 0: --memory decides.", least=0)
    max_num_seqs: int = setting(256, "Maximum requests that an engine runs at once.", least=1)
    max_num_batched_tokens: int = setting(8192, "Maximum tokens of one engine step.", least=1)
    prefill: str = setting(AUTO, "Arithmetic of slimkv's prefill: 16bit, 8bit or auto.")
    drafts: int = setting(0, "Tokens drafted for each step from n-grams of the text; 0: none.", least=0)
    eager: bool = setting(False, "Run without torch.compile and CUDA graphs.")
    seed: int = setting(0, "Seed of prompts and arrivals.", least=0)
    limit_seconds: int = setting(600, "Time limit of each system.", least=1)
    offload_gib: float = setting(40.0, "Host memory of the offload phase, in GiB.", positive=True)
    short_context: int = setting(0, "Tokens of a second prompt of the offload phase; 0: none.", least=0)
    rounds: int = setting(5, "Rounds of the offload phase; the median is reported.", least=1)
    users: int = setting(32, "Users of the sessions phase.", least=1)
    turns: int = setting(4, "Turns of each user.", least=1)
    think: float = setting(4.0, "Mean seconds between an answer and the user's next turn.", positive=True)
    held: float = setting(0.2, "Fraction of the bf16 bytes of all sessions that the cache gets.", positive=True)
    extra: tuple[tuple[str, Any], ...] = ()  # further engine arguments

    def __post_init__(self) -> None:
        check_limits(self)
        shape_config(self.shape)  # raises and lists the known shapes
        for name, system in DTYPES.items():
            if name != self.dtype and any(x.partition(":")[0] == system for x in self.systems):
                raise InputError(f"the system {system} needs dtype {name}, not {self.dtype}")
        if self.short_context > self.context:
            raise InputError(f"short_context must be 0 to {self.context}, the context; not {self.short_context}")
        own = {OFFLOAD, SESSIONS} & set(self.phases) or any(mark in x for x in self.systems for mark in "@+")
        if self.engine == "sglang" and own:
            raise InputError(
                f"the phases {OFFLOAD} and {SESSIONS}, memory layouts (@) and tiers (+) are vLLM's; leave them out "
                "with SGLang"
            )
        if self.cache_gib and (self.engine == "sglang" or SESSIONS in self.phases):
            raise InputError(
                f"--cache-gib is for vLLM, and not for the phase {SESSIONS}, which sizes the cache itself: use "
                "--memory or --held"
            )
        if SESSIONS in self.phases:
            if self.context * SHARED / self.turns < self.new_tokens + 1:
                raise InputError(
                    f"{self.turns} turns of {self.new_tokens} new tokens leave no room in {self.context} tokens"
                )
            shape_of(shape_config(self.shape))  # raises if the bytes of a token are unknown
        KVCacheConfig(prefill=self.prefill)  # raises and lists the known values
        for system in self.systems:
            cache_arguments(system, self.engine, self.prefill)
            tier_arguments(system, self.offload_gib)


class System(NamedTuple):
    """The parts of a system's name, ``format:backend+tier@layout``; empty where it has none."""

    format: str
    backend: str
    tier: str
    layout: str

    @classmethod
    def parse(cls, name: str) -> System:
        """``k4v4:triton+host@LBHNC``, for instance."""
        rest, _, layout = name.partition("@")
        cache, _, tier = rest.partition("+")
        format, _, backend = cache.partition(":")
        return cls(format, backend, tier, layout)


def cache_arguments(system: str, engine: str = "vllm", prefill: str = AUTO) -> dict[str, Any]:
    """Engine arguments of a system's cache: a stock cache dtype by its name, or a format of slimkv.

    ``k4v4:triton`` is a format with one implementation of store and attend, ``bf16:FLASHMLA`` a stock cache with one
    of the engine's own attention backends.
    """
    format, backend, *_ = System.parse(system)
    if _is_stock_format(format, engine):
        cache = {"kv_cache_dtype": _STOCK[engine].get(format, format)}
        backend = backend or ("" if engine == "vllm" else _sglang_attention())
        return {**cache, "attention_backend": backend} if backend else cache
    parse_spec(format, 64)  # raises and lists the known formats
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


def is_stock(system: str, engine: str = "vllm") -> bool:
    """Whether a system uses the engine's own cache alone, without slimkv."""
    parts = System.parse(system)
    return parts.tier != "cold" and _is_stock_format(parts.format, engine)


def _is_stock_format(format: str, engine: str) -> bool:
    return format in _STOCK[engine] or (engine == "vllm" and format.startswith("turboquant_"))


def tier_arguments(system: str, gib: float) -> dict[str, Any]:
    """vLLM's arguments for a system's tier: ``+host``, ``+cold`` or none."""
    tier = System.parse(system).tier
    if tier not in ("", "host", "cold"):
        raise InputError(f"the system {system!r} names a tier {tier!r}; known are +host and +cold")
    if tier == "host":
        return {"kv_offloading_size": gib, "kv_offloading_backend": "native"}
    if tier == "cold":
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
    """The plan that ``serve_engine`` runs."""
    shape = shape_config(settings.shape)
    longest = min(settings.context + settings.new_tokens + 64, text_field(shape, "max_position_embeddings"))
    own = _vllm_arguments if settings.engine == "vllm" else _sglang_arguments
    parts = System.parse(system)
    tier = "+host" if OFFLOAD in settings.phases and not parts.tier else system
    return {
        **asdict(settings),
        "system": system,
        "environment": {"VLLM_KV_CACHE_LAYOUT": parts.layout} if parts.layout else {},
        "arguments": {
            **own(settings, str(folder), longest), **cache_arguments(system, settings.engine, settings.prefill),
            **tier_arguments(tier, settings.offload_gib), **dict(settings.extra),
        },
        "vocabulary": text_field(shape, "vocab_size"),
    }  # fmt: skip


def _vllm_arguments(settings: ServeSettings, model: str, longest: int) -> dict[str, Any]:
    sized: dict[str, Any] = {}
    if settings.cache_gib:
        sized["kv_cache_memory_bytes"] = int(settings.cache_gib * 2**30)
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
