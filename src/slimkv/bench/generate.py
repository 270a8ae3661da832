"""Decoding through transformers' ``generate``: a packed cache with fused attention beside the stock one with SDPA."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError, MissingDependencyError
from slimkv.evals.provenance import Provenance, provenance


@dataclass(frozen=True)
class GenerateSettings:
    """A random-weight Llama (or a named model) and what it is asked to do."""

    model: str | None = None  # a model for ``slimkv.models.load``; None: random weights of the shape below
    layers: int = 8
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 32768
    batch: int = 1
    new_tokens: int = 64
    formats: tuple[str, ...] = ("k4v4",)
    dtype: str = "bfloat16"
    device: str = "cuda"
    rounds: int = 3  # each times every cache once, in turn; the median counts
    prefill_chunk: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "query_heads", "kv_heads", "context", "batch", "new_tokens", "rounds", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class GenerateRow:
    """One cache."""

    cache: str
    tokens_per_second: float  # of the whole batch, median of the rounds
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
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError('this needs transformers: pip install "slimkv[transformers]"') from error
    hidden = settings.query_heads * settings.head_dim
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.query_heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        vocab_size=1024,
        max_position_embeddings=settings.context + settings.new_tokens + 8,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    return model.eval()


def _new_cache(model: Any, word: str) -> Any:
    if word == "DynamicCache":
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from slimkv.integrations.transformers import SlimKVCache

    return SlimKVCache(model.config, word)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _one(model: Any, ids: Tensor, word: str, settings: GenerateSettings) -> tuple[float, float, Any]:
    """(seconds of the prefill, seconds per decode step, the filled cache)."""
    cache = _new_cache(model, word)
    _synchronize(model.device)
    start = time.perf_counter()
    for i in range(0, settings.context, settings.prefill_chunk):
        part = ids[:, i : min(i + settings.prefill_chunk, settings.context)]
        model(part, past_key_values=cache, logits_to_keep=1)
    _synchronize(model.device)
    prefilled = time.perf_counter()
    arguments = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "do_sample": False}
    # The first step allocates and, on a GPU, compiles; it is not timed.
    more = model.generate(ids, max_new_tokens=2, min_new_tokens=2, **arguments)
    arguments["attention_mask"] = torch.ones_like(more)
    _synchronize(model.device)
    decoding = time.perf_counter()
    model.generate(more, max_new_tokens=settings.new_tokens, min_new_tokens=settings.new_tokens, **arguments)
    _synchronize(model.device)
    return prefilled - start, (time.perf_counter() - decoding) / settings.new_tokens, cache


def time_generation(settings: GenerateSettings) -> GenerateReport:
    """Prefills ``context`` tokens and times ``new_tokens`` steps of ``generate`` for every cache, in one process."""
    from slimkv.integrations.transformers import attention

    if settings.model is None:
        model = random_llama(settings)
        limit = model.config.vocab_size
    else:
        from slimkv import models

        model = models.load(settings.model, getattr(torch, settings.dtype), settings.device).model
        model.generation_config.eos_token_id = None
        limit = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(3, limit, (settings.batch, settings.context + 1), generator=generator).to(model.device)
    words = ["DynamicCache", *settings.formats]
    steps: dict[str, list[float]] = {w: [] for w in words}
    prefills: dict[str, list[float]] = {w: [] for w in words}
    sizes: dict[str, tuple[int, float]] = {}
    for _ in range(settings.rounds):
        for word in words:
            if word == "DynamicCache":
                prefill, step, cache = _one(model, ids, word, settings)
                held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
                size = sum(t.numel() * t.element_size() for t in held)
                sizes[word] = size, size / sum(2 * t.numel() for t in held)
            else:
                with attention(model):
                    prefill, step, cache = _one(model, ids, word, settings)
                sizes[word] = cache.nbytes, cache.size().ratio
            steps[word].append(step)
            prefills[word].append(prefill)
            del cache
    stock = statistics.median(steps["DynamicCache"])
    rows = []
    for word in words:
        step = statistics.median(steps[word])
        rows.append(
            GenerateRow(
                word, settings.batch / step, 1000 * step, stock / step, *sizes[word], statistics.median(prefills[word])
            )
        )
    return GenerateReport(settings, tuple(rows), provenance(model.device))
