"""Where greedy text with a packed cache first differs from that of the stock cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Unpack

import torch

from slimkv.errors import InputError
from slimkv.lab.evals.harness import SERVING, STOCK, Common, Run, greedy

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List three uses of a paper clip.",
)


@dataclass(frozen=True)
class GenerationRow:
    """One format and prompt."""

    format: str
    prompt: str
    tokens: int  # generated with the stock cache
    first_divergence: int | None  # the first token that differs; None: all are the same
    same: float  # share of equal tokens, position by position
    text: str


@dataclass(frozen=True)
class GenerationReport:
    """``slimkv eval generation``."""

    model: str
    mode: str
    new_tokens: int
    raw_texts: tuple[str, ...]
    rows: tuple[GenerationRow, ...]
    seconds: float


def prompt_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids [1, tokens] of a question, in the tokenizer's chat format if it has one."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    return tokenizer(prompt, return_tensors="pt")["input_ids"]


def compare_tokens(expected: list[int], actual: list[int]) -> tuple[int | None, float]:
    """The first position that differs (or where one ends), and the share of equal positions."""
    equal = [a == b for a, b in zip(expected, actual, strict=False)]
    longest = max(len(expected), len(actual))
    first = next((i for i, same in enumerate(equal) if not same), None)
    if first is None and len(expected) != len(actual):
        first = len(equal)
    return first, sum(equal) / longest if longest else 1.0


def measure_generation(
    model: Any, tokenizer: Any, formats: Sequence[str], *, prompts: Sequence[str] = PROMPTS, new_tokens: int = 64,
    **common: Unpack[Common],
) -> GenerationReport:  # fmt: skip
    """Greedy generation of up to ``new_tokens`` tokens per prompt and format."""
    common.setdefault("mode", SERVING)
    run = Run(formats, **common)
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise InputError(f"generation needs prompts with words in them, not {list(prompts)!r}")
    rows, raw_texts, expected = list[GenerationRow](), list[str](), list[int]()
    for prompt, kind in run.each(list(product(prompts, [STOCK, *run.kinds])), lambda item: item[1].name):
        tokens = greedy(model, tokenizer, kind, run.mode, prompt_ids(tokenizer, prompt), new_tokens)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if kind is STOCK:
            expected = tokens
            raw_texts.append(text)
            continue
        first, same = compare_tokens(expected, tokens)
        rows.append(GenerationRow(kind.name, prompt, len(expected), first, same, text))
    return GenerationReport(run.name, run.mode, new_tokens, tuple(raw_texts), tuple(rows), run.seconds)
