"""Runs a model over windows of text with stock and packed caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.config import AUTO, CALIBRATED, KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.formats import is_latent_format
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.memory_plan import sequence_bytes, shape_of
from slimkv.spec import BF16_BYTES, parse_format, parse_size

RAW = "raw"
WITH_CALIBRATION = "+cal"
MEMORY = "memory="  # prefix of the name of a cache with a memory budget
STRICT, SERVING = "strict", "serving"
T = TypeVar("T")


@dataclass(frozen=True)
class CacheKind:
    """A cache to measure, by its name on the command line.

    ``raw``, ``k4v4``, ``k4v4+cal``, ``calibrated``, ``memory=90MiB``, ``memory=50%``, ``memory=k4v4``.
    """

    name: str
    format: str
    calibration: Calibration | None = None  # None: keys are rounded to the nearest level
    prefill: str = AUTO  # see ``KVCacheConfig``
    memory: str | None = None  # see ``budget``

    def new(self, model: Any, mode: str, tokens: int = 0) -> Any:
        """An empty cache of this kind, for a window of ``tokens``."""
        if mode not in (STRICT, SERVING):
            raise InputError(f"mode {mode!r} is not one of {STRICT}, {SERVING}")
        if self.format == RAW:
            from transformers import DynamicCache

            return DynamicCache(config=model.config)
        from slimkv.integrations.transformers import SlimKVCache

        return SlimKVCache(
            model, self.format, calibration=self.calibration, fresh="codes" if mode == STRICT else "raw",
            prefill=self.prefill, memory=None if self.memory is None else budget(self.memory, model, tokens),
        )  # fmt: skip


STOCK = CacheKind(RAW, RAW)


def check_formats(names: Sequence[str], calibrated: bool) -> None:
    """Raises unless every name is a format, with ``+cal`` or ``calibrated`` only if there is a calibration."""
    for name in names:
        format = name.removesuffix(WITH_CALIBRATION)
        if format.startswith(MEMORY):
            given = format.removeprefix(MEMORY).removesuffix("%")
            if not given[:1].isdigit():
                parse_format(given)
            elif not parse_size(given):
                raise InputError(f"{name!r} leaves a cache no memory; write {MEMORY}90MiB or {MEMORY}50%, for example")
        elif format != CALIBRATED and not is_latent_format(format):
            parse_format(format)
        if name.endswith(WITH_CALIBRATION) and (format in (RAW, CALIBRATED) or is_latent_format(format)):
            raise InputError(f"{name!r} is not a format that can be calibrated; write k4v4{WITH_CALIBRATION}")
        if (format == CALIBRATED or name != format) and not calibrated:
            raise InputError(f"{name!r} needs a calibration: give --calibration FILE (from slimkv calibrate) or auto")


def check_model(model: Any, names: Sequence[str]) -> None:
    """Raises for formats that the model's caches cannot have, such as those of K and V for latents."""
    from slimkv.integrations.transformers import SlimKVCache

    for format in (name.removesuffix(WITH_CALIBRATION) for name in names):
        if format not in (RAW, CALIBRATED) and not format.startswith(MEMORY):
            SlimKVCache(model.config, format)


def cache_kinds(names: Sequence[str], calibration: Calibration | None) -> list[CacheKind]:
    """The packed caches called ``names``, without ``raw``.

    If no name has ``+cal``, all caches use the calibration; otherwise only ``+cal`` and ``calibrated`` ones do, so that
    ``k4v4,k4v4+cal`` compares the two.
    """
    check_formats(names, calibration is not None)
    chosen = any(name.endswith(WITH_CALIBRATION) for name in names)
    kinds = []
    for name in names:
        format = name.removesuffix(WITH_CALIBRATION)
        used = not chosen or format != name or format == CALIBRATED
        known = calibration if used else None
        if format.startswith(MEMORY):
            kinds.append(CacheKind(name, AUTO, known, memory=format.removeprefix(MEMORY)))
        elif format != RAW:
            kinds.append(CacheKind(name, format, known))
    return kinds


def budget(given: str, model: Any, tokens: int) -> int:
    """The bytes of a budget: ``90MiB``, ``50%`` of ``tokens`` tokens in bfloat16, or those tokens in ``k4v4``."""
    if given[:1].isdigit() and not given.endswith("%"):
        return parse_size(given)
    if not tokens:
        raise InputError(f"{MEMORY}{given} is measured over whole windows: use slimkv eval positions, or a size")
    format, share, block = (RAW, parse_size(given[:-1]) / 100, 1) if given.endswith("%") else (given, 1.0, 64)
    return int(sequence_bytes(shape_of(model.config.to_dict()), format, tokens, block) * share)


def takes_budget(model: Any) -> bool:
    """Whether a cache of this model can have a memory budget."""
    from slimkv.integrations.transformers import SlimKVCache

    try:
        SlimKVCache(model.config, memory=1)
    except UnsupportedError:
        return False
    return True


def with_prefill(kinds: Sequence[CacheKind], prefill: Sequence[str]) -> list[CacheKind]:
    """Every kind with each arithmetic of ``prefill``, named ``k4v4@8bit`` if there are several."""
    for given in prefill:
        KVCacheConfig(prefill=given)  # raises for unknown values
    if not prefill or len(set(prefill)) < len(prefill):
        raise InputError(f"prefill must name each arithmetic once, not {', '.join(prefill) or 'none'}")
    return [
        replace(kind, name=f"{kind.name}@{given}" if len(prefill) > 1 else kind.name, prefill=given)
        for kind in kinds
        for given in prefill
    ]


@contextmanager
def attending(model: Any, format: str) -> Iterator[None]:
    """Inside the context, the model's attention reads packed codes directly; for ``raw`` it stays unchanged."""
    if format == RAW:
        yield
        return
    from slimkv.integrations.transformers import attention

    with attention(model):
        yield


@torch.no_grad()
def window_logits(model: Any, ids: Tensor, cache: Any, chunk: int | None = None) -> Tensor:
    """Logits of every position of ids [1, tokens]: float [tokens, vocabulary].

    Runs one pass, or passes of ``chunk`` tokens that read the cache of earlier passes.
    """
    size = chunk or ids.shape[1]
    parts = [
        model(ids[:, i : i + size], past_key_values=cache, use_cache=True).logits[0]
        for i in range(0, ids.shape[1], size)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def each_window(
    model: Any, windows: Tensor, kinds: Sequence[CacheKind], run: Run, chunk: int
) -> Iterator[tuple[CacheKind, Tensor, Tensor, float]]:
    """Runs every cache over windows int64 [count, tokens]; yields cache, ids [tokens], logits, bytes per token.

    ``serving`` feeds packed caches in passes of ``chunk`` tokens.
    """
    for window, kind in run.each(list(product(windows, kinds)), lambda item: item[1].name):
        ids, cache = window.to(model.device), kind.new(model, run.mode)
        with attending(model, kind.format):
            passes = chunk if run.mode == SERVING and kind.format != RAW else None
            logits = window_logits(model, ids[None], cache, passes)
        yield kind, ids, logits, bytes_per_token(cache)


def greedy(model: Any, tokenizer: Any, kind: CacheKind, mode: str, ids: Tensor, new_tokens: int) -> list[int]:
    """Greedy decoding from ids [1, tokens]: up to ``new_tokens`` new tokens."""
    ids = ids.to(model.device)
    with attending(model, kind.format):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=kind.new(model, mode), max_new_tokens=new_tokens,
            do_sample=False, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def cache_bytes(cache: Any) -> tuple[int, int]:
    """Bytes that a stock or a packed cache allocates, and those of its tokens in bfloat16."""
    if hasattr(cache, "size"):
        size = cache.size()
        return size.allocated_bytes, size.bf16_bytes
    held = [x for y in cache.layers for x in (getattr(y, "keys", None), getattr(y, "values", None)) if x is not None]
    return sum(x.numel() * x.element_size() for x in held), sum(BF16_BYTES * x.numel() for x in held)


def bytes_per_token(cache: Any) -> float:
    """The bytes of one more token in all layers, as allocated in pages, while no sliding window is full.

    ``slimkv plan`` and ``slimkv calibrate`` define bytes per token in the same way. Layers that are not packed count as
    bfloat16. The cache must have seen a token.
    """
    total = 0.0
    for layer in cache.layers:
        if (pool := getattr(layer, "pool", None)) is not None:
            total += pool.layout.bytes_per_token * pool.num_kv_heads
        elif getattr(layer, "keys", None) is not None:
            total += sum(BF16_BYTES * x.shape[1] * x.shape[-1] for x in (layer.keys, layer.values))
    return total


class Stopwatch:
    """Measures the seconds since its creation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Rounded to milliseconds."""
        return round(time.perf_counter() - self._start, 3)


class Common(TypedDict, total=False):
    """Options of every eval."""

    name: str  # the model's name in the report
    mode: str  # strict: attention reads every key and value through the codec; serving: new chunks stay unquantised
    calibration: Calibration | None
    progress: Progress


class Run(Stopwatch):
    """One eval: the packed caches it measures, and the options it was given."""

    def __init__(
        self, formats: Sequence[str], name: str = "", mode: str = STRICT, calibration: Calibration | None = None,
        progress: Progress = silent,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kinds = cache_kinds(formats, calibration)
        self.name, self.mode, self.progress = name, mode, progress
        self.source = calibration.source if calibration is not None else None  # the calibration's tokens

    def each(self, items: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
        """The items in order, each reported as one step of the progress."""
        for number, item in enumerate(items):
            self.progress(name(item), number, len(items))
            yield item
        self.progress("done", len(items), len(items))
