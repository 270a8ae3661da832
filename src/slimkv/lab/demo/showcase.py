"""The demonstration on a real model: the size and quality of each cache, and two questions answered side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.lab.evals.agreement import AgreementReport, measure_agreement
from slimkv.lab.evals.generation import compare_tokens, prompt_ids
from slimkv.lab.evals.harness import RAW, SERVING, STOCK, CacheKind, Stopwatch, attending, cache_bytes, cache_kinds
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.lab.provenance import Provenance, provenance
from slimkv.memory_plan import sequence_bytes, shape_of

BEST = "k4v4+cal"
ANSWERING = (BEST, "k4v4", "turboquant_4bit_nc", "fp8")
MEASURED = (*ANSWERING, "k3v3+cal", "k6v6+cal")
REMEMBERED = {"bf16": RAW, **{x: x for x in ("fp8", "turboquant_4bit_nc", "k4v4", "k3v3")}}  # drawn in the memory chart
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
TEXT_TOKENS = 1024
SHORT_QUESTION = "What is photosynthesis, and why does it matter?"
LONG_QUESTION = "What is the password of the garden gate?"
_FACT = '\n\nNote: the password of the garden gate is "marigold".\n\n'
_FACT_DEPTH = 0.5
STOCK_NAME = "DynamicCache"
SHORTEST_TEXT = 192  # minimum tokens of a long text

Shown = Callable[[str, Mapping[str, str]], None]  # the question, and the texts so far by cache


@dataclass(frozen=True)
class Answer:
    """One cache's answer to a question."""

    cache: str
    text: str
    tokens: int
    first_difference: int | None  # first token that differs from the stock cache's; None: all are the same
    tokens_per_second: float
    cache_bytes: int
    bf16_bytes: int  # the same tokens in bfloat16


@dataclass(frozen=True)
class Question:
    """A question and its answers, the stock cache's first."""

    text: str
    context_tokens: int
    answers: tuple[Answer, ...]


class Reader:
    """Fills one cache with a prompt and answers from it, token by token."""

    def __init__(self, model: Any, kind: CacheKind) -> None:
        self.model, self.kind = model, kind
        self.name = STOCK_NAME if kind is STOCK else kind.name
        self.cache = kind.new(model, SERVING)
        self.tokens: list[int] = []
        self.seconds, self.last_seconds = 0.0, 0.0
        self.next = -1

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Reads ids [1, tokens]; returns the logits of the last: [1, vocabulary]."""
        # Only a comparison switches a model between caches, so switching is not timed.
        with attending(self.model, self.kind.format):
            start = time.perf_counter()
            ids = ids.to(self.model.device)
            logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[0]
            self.next = int(logits[-1].argmax())
            self.last_seconds = time.perf_counter() - start
        return logits

    def step(self) -> None:
        """Appends the most likely token and runs the model on it; only these steps are timed."""
        self.tokens.append(self.next)
        self.read(torch.tensor([[self.next]]))
        self.seconds += self.last_seconds

    def answer(self, tokenizer: Any, expected: list[int]) -> Answer:
        """The answer so far; ``expected``: the stock cache's tokens."""
        text = tokenizer.decode(self.tokens, skip_special_tokens=True)
        first, _ = compare_tokens(expected, self.tokens)
        speed = len(self.tokens) / self.seconds if self.seconds else 0.0
        return Answer(self.name, text, len(self.tokens), first, speed, *cache_bytes(self.cache))


def read_together(readers: Sequence[Reader], ids: Tensor) -> None:
    """Stores the first tokens ids [1, tokens] of the prompt in every reader's empty cache; the model reads them once.

    With every cache, a long pass over an empty cache attends to unquantised keys and values, so all caches can store
    those of the stock cache. Models with other states read the prompt once per cache.
    """
    from slimkv.integrations.transformers.layer_settings import RAW_FRESH_ABOVE
    from slimkv.integrations.transformers.layers import PackedLayer

    stock, *packed = readers
    all_packed = all(isinstance(layer, PackedLayer) for reader in packed for layer in reader.cache.layers)
    if not all_packed or ids.shape[1] <= RAW_FRESH_ABOVE:
        for reader in readers:
            reader.read(ids)
        return
    kept = stock.cache.update

    def update(key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for reader in packed:
            reader.cache.update(key, value, layer_idx)
        return kept(key, value, layer_idx, *args, **kwargs)

    stock.cache.update = update
    try:
        stock.read(ids)
    finally:
        del stock.cache.update
    for reader in packed:
        reader.next = stock.next


def decode(readers: Sequence[Reader], tokenizer: Any, question: str, new_tokens: int, shown: Shown) -> list[Answer]:
    """The readers answer greedily in turns, up to ``new_tokens`` each; ``shown`` gets the texts after each turn."""
    configured = getattr(getattr(readers[0].model, "generation_config", None), "eos_token_id", None)
    stop = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}

    def talking(reader: Reader) -> bool:
        return reader.next not in stop and len(reader.tokens) < new_tokens

    while any(talking(reader) for reader in readers):
        for reader in readers:
            if talking(reader):
                reader.step()
        shown(question, {r.name: tokenizer.decode(r.tokens, skip_special_tokens=True) for r in readers})
    return [reader.answer(tokenizer, readers[0].tokens) for reader in readers]


def ask(
    model: Any, tokenizer: Any, kinds: Sequence[CacheKind], question: str, ids: Tensor, new_tokens: int, shown: Shown
) -> Question:
    """The answers of the stock cache and of ``kinds`` to a question whose prompt is ids [1, tokens]."""
    readers = [Reader(model, kind) for kind in (STOCK, *kinds)]
    read_together(readers, ids)
    return Question(question, ids.shape[1], tuple(decode(readers, tokenizer, question, new_tokens, shown)))


def long_prompt(model: Any, tokenizer: Any, text: str, tokens: int, new_tokens: int) -> Tensor | None:
    """Ids [1, about ``tokens``] of ``text`` with a fact hidden in the middle, and the question about it at the end.

    Shortened to fit the model's context; None if fewer than ``SHORTEST_TEXT`` tokens fit.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens * 2
    tokens = min(tokens, limit - new_tokens - 128)
    if tokens < SHORTEST_TEXT:
        return None
    words = tokenizer(text[: 12 * tokens], add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    cut = int(len(words) * _FACT_DEPTH)
    body = tokenizer.decode(words[:cut]) + _FACT + tokenizer.decode(words[cut:])
    return prompt_ids(tokenizer, f"{body}\n\n{LONG_QUESTION}")


@dataclass(frozen=True)
class Showcase:
    """Everything ``slimkv demo`` measures."""

    model: str
    calibration: str  # the tokens of the calibration
    best: str  # the cache shown beside the stock cache
    short: Question
    long: Question | None  # None: the model's context is too short
    quality: AgreementReport
    contexts: tuple[int, ...]
    memory: dict[str, tuple[int, ...]]  # cache bytes of one sequence at each context, by format
    run: Provenance
    seconds: float


def run_showcase(
    model: Any, tokenizer: Any, calibration: Calibration, *, name: str, best: str = BEST, new_tokens: int = 64,
    long_new_tokens: int = 24, text_tokens: int = TEXT_TOKENS, windows: int = 2, window_tokens: int = 192,
    shown: Shown = lambda question, texts: None, progress: Progress = silent,
) -> Showcase:  # fmt: skip
    """Asks both questions and measures every format on the included text.

    ``best`` answers the short question beside the stock cache; all of ``ANSWERING`` answer the long one.
    """
    watch = Stopwatch()
    text = load_text()
    answering, measured = ([best, *(x for x in formats if x != best)] for formats in (ANSWERING, MEASURED))
    kinds = cache_kinds([*answering, BEST], calibration)[:-1]  # with BEST, only ``+cal`` formats use the calibration
    short = ask(model, tokenizer, kinds[:1], SHORT_QUESTION, prompt_ids(tokenizer, SHORT_QUESTION), new_tokens, shown)
    prompt, long = long_prompt(model, tokenizer, text, text_tokens, long_new_tokens), None
    if prompt is not None:
        progress(f"reading {prompt.shape[1]:,} tokens", 0, 1)
        long = ask(model, tokenizer, kinds, LONG_QUESTION, prompt, long_new_tokens, shown)
    ids = token_windows(tokenizer, text, windows, window_tokens)
    quality = measure_agreement(model, ids, measured, name=name, progress=progress, calibration=calibration)
    shape = shape_of(model.config.to_dict())
    curves = {name: tuple(sequence_bytes(shape, x, c, 64) for c in CONTEXTS) for name, x in REMEMBERED.items()}
    return Showcase(
        name, calibration.source, best, short, long, quality, CONTEXTS, curves, provenance(model.device), watch.seconds
    )
