"""Questions that several caches answer side by side: a short one, and one about a text of thousands of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.lab.evals.agreement import compare_logits
from slimkv.lab.evals.generation import compare_tokens, prompt_ids
from slimkv.lab.evals.harness import SERVING, STOCK, CacheKind, Progress, attending, cache_bytes, quiet

SHORT_QUESTION = "What is photosynthesis, and why does it matter?"
LONG_QUESTION = "What is the password of the garden gate?"
_FACT = '\n\nNote: the password of the garden gate is "marigold".\n\n'
_FACT_DEPTH = 0.5
STOCK_NAME = "DynamicCache"
SHORTEST_TEXT = 192  # minimum tokens of a long text

Shown = Callable[[str, Mapping[str, str]], None]  # the question, and the texts so far by cache


@dataclass(frozen=True)
class Answer:
    """One cache answering."""

    cache: str
    text: str
    tokens: int
    first_difference: int | None  # first token that differs from the stock cache's; None: all are the same
    tokens_per_second: float
    cache_bytes: int
    bf16_bytes: int  # the same tokens in bfloat16


@dataclass(frozen=True)
class Continuation:
    """Predictions of one cache for the last tokens of the text, with all earlier ones cached."""

    cache: str
    top1: float  # share of tokens whose most likely successor is the stock cache's
    kl: float  # mean KL(stock || this), nats


@dataclass(frozen=True)
class Question:
    """A question and its answers, the stock cache's first."""

    text: str
    context_tokens: int
    answers: tuple[Answer, ...]
    continued_tokens: int = 0  # of the text of a long question
    continuations: tuple[Continuation, ...] = ()


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
    def read(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Reads ids [1, tokens]; returns the logits of the last ``keep`` of them: [keep, vocabulary]."""
        # Switching the model between caches is only needed here and is not timed.
        with attending(self.model, self.kind.format):
            start = time.perf_counter()
            ids = ids.to(self.model.device)
            logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep).logits[0]
            self.next = int(logits[-1].argmax())
            self.last_seconds = time.perf_counter() - start
        return logits

    def step(self) -> None:
        """Takes the most likely token and reads it; only this is timed."""
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

    A long pass over an empty cache attends unquantised keys and values with every cache, so all caches can store those
    of the stock cache. Models with other states read the prompt once per cache.
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


def ask_short(model: Any, tokenizer: Any, kinds: Sequence[CacheKind], new_tokens: int, shown: Shown) -> Question:
    """A question of a few words."""
    readers, ids = [Reader(model, kind) for kind in (STOCK, *kinds)], prompt_ids(tokenizer, SHORT_QUESTION)
    read_together(readers, ids)
    answers = decode(readers, tokenizer, SHORT_QUESTION, new_tokens, shown)
    return Question(SHORT_QUESTION, ids.shape[1], tuple(answers))


def ask_long(
    model: Any, tokenizer: Any, kinds: Sequence[CacheKind], text: str, text_tokens: int, new_tokens: int, shown: Shown,
    progress: Progress = quiet,
) -> Question | None:  # fmt: skip
    """A question about ``text_tokens`` tokens of ``text``, with a fact hidden in the middle.

    Predictions for the end of the text are compared too. None if the model's context is too short.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or text_tokens * 2
    text_tokens = min(text_tokens, limit - new_tokens - 128)
    if text_tokens < SHORTEST_TEXT:
        return None
    ids = _long_prompt(tokenizer, text, text_tokens)
    readers = [Reader(model, kind) for kind in (STOCK, *kinds)]
    steps = len(readers) + 1
    progress(f"reading {ids.shape[1]:,} tokens", 0, steps)
    end = max(text_tokens - 16, 1)  # the question follows
    compared = min(256, end // 4)
    read_together(readers, ids[:, : end - compared])
    found = []
    for number, reader in enumerate(readers):
        progress(f"{reader.name} at {ids.shape[1]:,} tokens", number + 1, steps)
        logits = reader.read(ids[:, end - compared : end], keep=compared)
        if reader is readers[0]:
            stock = logits
        else:
            same, kl = compare_logits(stock, logits)
            found.append(Continuation(reader.name, float(same.double().mean()), float(kl.double().mean())))
        reader.read(ids[:, end:])
    answers = decode(readers, tokenizer, LONG_QUESTION, new_tokens, shown)
    return Question(LONG_QUESTION, ids.shape[1], tuple(answers), compared, tuple(found))


def _long_prompt(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """Token ids [1, about ``tokens``] of the text with the fact in it and the question at the end."""
    words = tokenizer(text[: 12 * tokens], add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    cut = int(len(words) * _FACT_DEPTH)
    body = tokenizer.decode(words[:cut]) + _FACT + tokenizer.decode(words[cut:])
    return prompt_ids(tokenizer, f"{body}\n\n{LONG_QUESTION}")
