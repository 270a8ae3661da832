"""How evals run a model over a window of tokens with a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError

RAW = "raw"
STRICT, SERVING = "strict", "serving"
Progress = Callable[[str, int, int], None]  # what, done, of


def quiet(what: str, done: int, total: int) -> None:
    """No progress."""


def check_mode(mode: str) -> None:
    """Raises unless ``mode`` is known."""
    if mode not in (STRICT, SERVING):
        raise InputError(f"mode {mode!r} is not one of {STRICT}, {SERVING}")


def new_cache(model: Any, format: str | dict[int | str, str], mode: str, **options: Any) -> Any:
    """An empty cache: stock for ``raw``, packed otherwise, in one format or one per layer."""
    check_mode(mode)
    if format == RAW:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from slimkv.integrations.transformers import SlimKVCache

    fresh = "codes" if mode == STRICT else "raw"
    formats = {"format": format} if isinstance(format, str) else {"layers": format}
    return SlimKVCache(model.config, **formats, fresh=fresh, **options)


@contextmanager
def attending(model: Any, format: str) -> Iterator[None]:
    """Packed caches are attended directly; the raw one as the model likes it."""
    if format == RAW:
        yield
        return
    from slimkv.integrations.transformers import attention

    with attention(model):
        yield


@torch.no_grad()
def window_logits(model: Any, ids: Tensor, cache: Any, chunk: int | None = None) -> Tensor:
    """Logits of every position of ids [1, tokens]: float [tokens, vocabulary].

    In one pass, or in passes of ``chunk`` tokens, so that later ones read what earlier ones cached.
    """
    size = chunk or ids.shape[1]
    parts = [
        model(ids[:, i : i + size], past_key_values=cache, use_cache=True).logits[0]
        for i in range(0, ids.shape[1], size)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def bytes_per_token(cache: Any) -> float:
    """Allocated bytes per token and sequence, all layers together, of a filled cache (bf16 for the stock one)."""
    if hasattr(cache, "size"):
        size = cache.size()
        return size.allocated_bytes / (size.tokens * size.batch)
    held = [(x.keys, x.values) for x in cache.layers if getattr(x, "keys", None) is not None]
    return sum(2 * t.numel() for pair in held for t in pair) / (held[0][0].shape[0] * cache.get_seq_length())


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Rounded to milliseconds."""
        return round(time.perf_counter() - self._start, 3)
