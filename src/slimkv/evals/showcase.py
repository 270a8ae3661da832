"""The demonstration on a real model: one question answered with both caches, then what each format costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.evals.agreement import AgreementReport, measure_agreement
from slimkv.evals.generation import prompt_ids
from slimkv.evals.harness import RAW, SERVING, Progress, Stopwatch, attending, new_cache, quiet
from slimkv.evals.layers import LayerReport, measure_layers
from slimkv.evals.texts import load_text, token_windows
from slimkv.provenance import Provenance, provenance
from slimkv.spec import BF16_BYTES, CodecSpec, PageLayout

QUESTION = "What is photosynthesis, and why does it matter?"
FORMATS = ("k3v3", "k4v4", "turboquant_4bit_nc", "k5v4", "k6v6", "fp8")
CONTEXTS = (1024, 2048, 4096, 8192)

Shown = Callable[[str, str], None]  # the two texts so far: stock, packed


@dataclass(frozen=True)
class Answer:
    """One cache answering the question."""

    cache: str
    text: str
    tokens: int
    tokens_per_second: float
    cache_bytes: int
    bf16_bytes: int  # the same tokens in bfloat16


@dataclass(frozen=True)
class MemoryCurve:
    """Cache bytes of one sequence at each context length, from the page layout."""

    format: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Showcase:
    """Everything ``slimkv demo`` measures."""

    model: str
    question: str
    context_tokens: int
    answers: tuple[Answer, Answer]
    quality: AgreementReport
    layers: LayerReport
    contexts: tuple[int, ...]
    memory: tuple[MemoryCurve, ...]
    run: Provenance
    seconds: float


class _Greedy:
    """Greedy decoding one step at a time, with its own clock."""

    def __init__(self, model: Any, format: str, ids: Tensor, stop: set[int]) -> None:
        self.model, self.format, self.stop = model, format, stop
        self.cache = new_cache(model, format, SERVING)
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._next = self._forward(ids)  # the prefill is not part of the decoding speed

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> int:
        with attending(self.model, self.format):
            return int(self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits[0, -1].argmax())

    @property
    def done(self) -> bool:
        return self._next in self.stop

    def step(self) -> None:
        self.tokens.append(self._next)
        start = time.perf_counter()
        self._next = self._forward(torch.tensor([[self._next]], device=self.model.device))
        self.seconds += time.perf_counter() - start


def answer_both(
    model: Any, tokenizer: Any, ids: Tensor, format: str, new_tokens: int, shown: Shown
) -> tuple[Answer, Answer]:
    """Both caches answer token by token in turn; ``shown`` gets the texts after every step."""
    stop = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    runs = [_Greedy(model, w, ids.to(model.device), stop) for w in (RAW, format)]
    while any(not r.done and len(r.tokens) < new_tokens for r in runs):
        for run in runs:
            if not run.done and len(run.tokens) < new_tokens:
                run.step()
        shown(*(tokenizer.decode(r.tokens) for r in runs))
    answers = []
    for name, run in zip(("DynamicCache", format), runs, strict=True):
        if hasattr(run.cache, "size"):
            size = run.cache.size()
            allocated, plain = size.allocated_bytes, size.bf16_bytes
        else:
            held = [t for layer in run.cache.layers for t in (layer.keys, layer.values)]
            allocated = sum(t.numel() * t.element_size() for t in held)
            plain = sum(BF16_BYTES * t.numel() for t in held)
        speed = len(run.tokens) / run.seconds if run.seconds else 0.0
        answers.append(Answer(name, tokenizer.decode(run.tokens), len(run.tokens), speed, allocated, plain))
    return answers[0], answers[1]


def memory_curves(config: Any, formats: Sequence[str], contexts: Sequence[int]) -> Iterator[MemoryCurve]:
    """Bytes of one sequence at each context, bfloat16 first; sliding layers hold at most their window."""
    from slimkv.integrations.transformers.compat import layer_kinds

    text = config.get_text_config(decoder=True)
    heads = text.num_key_value_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    windows = [arguments.get("sliding_window") for _, arguments in layer_kinds(config)]

    def kept(context: int) -> list[int]:
        return [context if window is None else min(context, window) for window in windows]

    plain = tuple(sum(heads * 2 * dim * BF16_BYTES * n for n in kept(c)) for c in contexts)
    yield MemoryCurve("bf16", plain)
    for format in formats:
        layout = PageLayout(CodecSpec.parse(format, dim), 64)
        total = (sum(layout.pool_bytes(layout.blocks_for(n), heads) for n in kept(c)) for c in contexts)
        yield MemoryCurve(format, tuple(total))


def run_showcase(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    formats: Sequence[str] = FORMATS,
    answer_format: str = "k4v4",
    question: str = QUESTION,
    new_tokens: int = 160,
    windows: int = 3,
    window_tokens: int = 512,
    shown: Shown = lambda stock, packed: None,
    progress: Progress = quiet,
) -> Showcase:
    """Answers the question with both caches and measures every format on the shipped text."""
    watch = Stopwatch()
    text = load_text()
    ids = prompt_ids(tokenizer, question)
    answers = answer_both(model, tokenizer, ids, answer_format, new_tokens, shown)
    ids_windows = token_windows(tokenizer, text, windows, window_tokens)
    quality = measure_agreement(model, ids_windows, formats, name=name, progress=progress)
    layers = measure_layers(model, ids_windows[:1], ("k3v3", "k4v4", "k6v6"), name=name, progress=progress)
    curves = tuple(memory_curves(model.config, formats, CONTEXTS))
    return Showcase(
        name, question, ids.shape[1], answers, quality, layers, CONTEXTS, curves, provenance(model.device),
        watch.seconds,
    )  # fmt: skip
