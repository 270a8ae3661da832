"""Times decoding through ``generate``: a packed cache with fused attention, and the stock cache with SDPA.

Every decode step has a new sequence length, and torch may do extra work for each new length (cuDNN builds a plan). So
rounds use different lengths.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.lab import models
from slimkv.lab.evals.harness import SERVING, STOCK, CacheKind, attending, cache_bytes, cache_kinds
from slimkv.lab.models import DTYPES
from slimkv.lab.provenance import Provenance, provenance
from slimkv.lab.settings import check_limits, setting

STOCK_NAME = "DynamicCache"
CPU_SIZES: dict[str, Any] = {"context": 1024, "layers": 2, "dtype": "float32"}  # defaults on a CPU


@dataclass(frozen=True)
class GenerateSettings:
    """A random-weight Llama (or a named model) and its workload."""

    model: str | None = setting(None, "A packaged model, a folder or a hub name; default: a Llama with random weights.")
    formats: tuple[str, ...] = setting(("k4v4",), "Formats to time, such as k4v4,k6v6.", option="format")
    context: int = setting(32768, "Tokens cached before decoding; default: 32768 on a GPU, 1024 on a CPU.", least=1)
    batch: int = setting(1, "Sequences in the batch.", least=1)
    new_tokens: int = setting(64, "Decode steps to time.", least=1)
    layers: int = setting(8, "Layers of the random-weight model; default: 8 on a GPU, 2 on a CPU.", least=1)
    num_heads: int = setting(32, least=1)
    num_kv_heads: int = setting(8, least=1)
    head_dim: int = 128
    rounds: int = setting(3, "Rounds; each times every cache once, and the median is reported.", least=1)
    dtype: str = setting("bfloat16", "Data type; default: bfloat16 on a GPU, float32 on a CPU", known=DTYPES)
    device: str = "cuda"
    prefill_chunk: int = setting(4096, least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class GenerateRow:
    """The figures of one cache."""

    cache: str
    tokens_per_second: float  # for the whole batch, median of the rounds
    milliseconds_per_step: float
    over_stock: float  # tokens per second over those of DynamicCache in the same run
    cache_bytes: int
    bytes_of_bf16: float  # cache bytes over the same tokens in bfloat16
    prefill_seconds: float


@dataclass(frozen=True)
class GenerateReport:
    """``slimkv bench generate``."""

    settings: GenerateSettings
    rows: tuple[GenerateRow, ...]
    run: Provenance


def random_llama(settings: GenerateSettings) -> Any:
    """A Llama with random weights and a small vocabulary, so that attention and the cache dominate."""
    transformers = models.import_transformers()
    hidden = settings.num_heads * settings.head_dim
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=settings.layers, head_dim=settings.head_dim,
        num_attention_heads=settings.num_heads, num_key_value_heads=settings.num_kv_heads, vocab_size=1024,
        max_position_embeddings=settings.context + (settings.new_tokens + 4) * (settings.rounds + 1),
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    return model.eval()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _one(model: Any, ids: Tensor, kind: CacheKind, settings: GenerateSettings) -> tuple[float, float, Any]:
    """Fills a cache with all of ``ids`` but the last, and decodes: (seconds of prefill, of one step, the cache)."""
    cache, context, new = kind.new(model, SERVING), ids.shape[1] - 1, settings.new_tokens
    _synchronize(model.device)
    start = time.perf_counter()
    for i in range(0, context, settings.prefill_chunk):
        part = ids[:, i : min(i + settings.prefill_chunk, context)]
        model(part, past_key_values=cache, logits_to_keep=1)
    _synchronize(model.device)
    prefill = time.perf_counter() - start

    def decode(given: Tensor, count: int) -> tuple[float, Tensor]:
        arguments = {"attention_mask": torch.ones_like(given), "past_key_values": cache, "do_sample": False}
        _synchronize(model.device)
        begin = time.perf_counter()
        out = model.generate(given, max_new_tokens=count, min_new_tokens=count, **arguments)
        _synchronize(model.device)
        return (time.perf_counter() - begin) / count, out

    # The first steps allocate and, on a GPU, compile; they are not timed.
    _, more = decode(ids, 2)
    step, _ = decode(more, new)
    return prefill, step, cache


def time_generation(
    settings: GenerateSettings, model: Any = None, calibration: Calibration | None = None
) -> GenerateReport:
    """Prefills ``context`` tokens and times ``new_tokens`` steps of ``generate`` for every cache, in one process.

    ``model``: a loaded model that replaces the one in the settings. ``calibration``: for formats with ``+cal``.
    """
    if model is None and settings.model is not None:
        model = models.load(settings.model, models.parse_dtype(settings.dtype), settings.device).model
    model = model if model is not None else random_llama(settings)
    limit = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(settings.seed)
    # Rounds use disjoint ranges of lengths.
    apart = settings.new_tokens + 4
    longest = settings.context + apart * (settings.rounds - 1) + 1
    ids = torch.randint(3, limit, (settings.batch, longest), generator=generator).to(model.device)
    kinds = {STOCK_NAME: STOCK, **{kind.name: kind for kind in cache_kinds(settings.formats, calibration)}}
    prefills, steps = ({name: list[float]() for name in kinds} for _ in range(2))  # seconds of each round
    sizes: dict[str, tuple[int, float]] = {}
    configured, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        for number in range(settings.rounds):
            given = ids[:, : settings.context + apart * number + 1]
            for name, kind in kinds.items():
                with attending(model, kind.format):
                    prefill, step, cache = _one(model, given, kind, settings)
                size, in_bf16 = cache_bytes(cache)
                sizes[name] = size, size / in_bf16
                prefills[name].append(prefill)
                steps[name].append(step)
                del cache
    finally:
        model.generation_config.eos_token_id = configured

    rows = []
    for name in kinds:
        step, stock = (statistics.median(steps[x]) for x in (name, STOCK_NAME))
        speed = settings.batch / step, 1000 * step, stock / step
        rows.append(GenerateRow(name, *speed, *sizes[name], statistics.median(prefills[name])))
    return GenerateReport(settings, tuple(rows), provenance(model.device))
