"""The demonstration on a real model: the size and quality of each cache, and two questions answered by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimkv.calibration import Calibration
from slimkv.lab.demo.questions import Question, Reader, Shown, ask_long, ask_short
from slimkv.lab.evals.agreement import AgreementReport, measure_agreement
from slimkv.lab.evals.harness import RAW, Progress, Stopwatch, cache_kinds, quiet
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.lab.provenance import Provenance, provenance
from slimkv.spec import BF16_BYTES, CodecSpec, PageLayout

BEST = "k4v4+cal"
ANSWERING = (BEST, "k4v4", "turboquant_4bit_nc", "fp8")
MEASURED = (*ANSWERING, "k3v3+cal", "k6v6+cal")
REMEMBERED = ("fp8", "turboquant_4bit_nc", "k4v4", "k3v3")  # formats of the memory chart
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
TEXT_TOKENS = 2048


@dataclass(frozen=True)
class MemoryCurve:
    """Cache bytes of one sequence at each context length, from the page layout."""

    format: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Showcase:
    """Everything ``slimkv demo`` measures."""

    model: str
    calibration: str  # the tokens the calibration was made on
    best: str  # the cache in front
    short: Question
    long: Question | None  # None: the context of the model is too short
    quality: AgreementReport
    contexts: tuple[int, ...]
    memory: tuple[MemoryCurve, ...]
    run: Provenance
    seconds: float


def memory_curves(model: Any, formats: Sequence[str], contexts: Sequence[int]) -> list[MemoryCurve]:
    """Bytes of one sequence at each context, bfloat16 first; sliding layers hold at most their window.

    The shapes of the layers come from a packed cache that has read a token. Other kinds of layers do not grow with the
    context and are not counted.
    """
    import torch

    reader = Reader(model, cache_kinds([formats[0]], None)[0])
    reader.read(torch.zeros(1, 1, dtype=torch.int64))
    layers = [layer for layer in reader.cache.layers if getattr(layer, "pool", None) is not None]

    def total(format: str, context: int) -> int:
        size = 0
        for layer in layers:
            spec, tokens = layer.pool.layout.spec, min(context, layer.window or context)
            heads = layer.pool.num_kv_heads
            if format == RAW:
                size += heads * tokens * BF16_BYTES * (spec.key_dim + spec.value_dim)
            else:
                layout = PageLayout(CodecSpec.parse(format, spec.key_dim, spec.value_dim), 64)
                size += layout.pool_bytes(layout.blocks_for(tokens), heads)
        return size

    named = [(RAW, "bf16"), *((format, format) for format in formats)]
    return [MemoryCurve(name, tuple(total(format, c) for c in contexts)) for format, name in named]


def run_showcase(
    model: Any,
    tokenizer: Any,
    calibration: Calibration,
    *,
    name: str,
    best: str = BEST,
    answering: Sequence[str] = ANSWERING,
    measured: Sequence[str] = MEASURED,
    new_tokens: int = 96,
    long_new_tokens: int = 24,
    text_tokens: int = TEXT_TOKENS,
    windows: int = 2,
    window_tokens: int = 384,
    shown: Shown = lambda question, texts: None,
    progress: Progress = quiet,
) -> Showcase:
    """Asks both questions and measures every format on the included text.

    ``best`` answers the short question beside the stock cache; all of ``answering`` answer the long one.
    """
    watch = Stopwatch()
    text = load_text()
    answering = [best, *(format for format in answering if format != best)]
    measured = [best, *(format for format in measured if format != best)]
    kinds = cache_kinds([*answering, BEST], calibration)[:-1]  # with BEST in the list only ``+cal`` is calibrated
    short = ask_short(model, tokenizer, kinds[:1], new_tokens, shown)
    long = ask_long(model, tokenizer, kinds, text, text_tokens, long_new_tokens, shown, progress)
    ids = token_windows(tokenizer, text, windows, window_tokens)
    quality = measure_agreement(model, ids, measured, name=name, progress=progress, calibration=calibration)
    curves = tuple(memory_curves(model, REMEMBERED, CONTEXTS))
    return Showcase(
        name, calibration.source, best, short, long, quality, CONTEXTS, curves, provenance(model.device), watch.seconds
    )
