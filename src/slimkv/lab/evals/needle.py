"""Needle in a haystack: whether the model finds one sentence at any depth of a text of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Unpack

import torch

from slimkv.errors import InputError
from slimkv.lab.evals.harness import SERVING, STOCK, Common, Run, greedy
from slimkv.lab.evals.texts import CHARACTERS_PER_TOKEN

_NEEDLE = "\nRemember this: the secret number of {city} is {number}.\n"
_QUESTION = "\nQuestion: what is the secret number of {city}? Answer: the secret number of {city} is"
_CASES = (("Lisbon", 7421), ("Nairobi", 3862), ("Oslo", 9147), ("Lima", 5238))


@dataclass(frozen=True)
class NeedleCell:
    """The number of needles found for one format, context and depth."""

    format: str
    context: int
    depth: float
    found: int
    tried: int


@dataclass(frozen=True)
class NeedleReport:
    """``slimkv eval needle``."""

    model: str
    mode: str
    cells: tuple[NeedleCell, ...]
    seconds: float


def haystack(
    tokenizer: Any, text: str, context: int, depth: float, city: str, number: int, offset: int = 0
) -> torch.Tensor:
    """Token ids [1, context] of the text with the needle at ``depth`` (0: start, 1: end), then the question.
    The text begins at token ``offset``.
    """
    needle = tokenizer(_NEEDLE.format(city=city, number=number), add_special_tokens=False)["input_ids"]
    question = tokenizer(_QUESTION.format(city=city), add_special_tokens=False)["input_ids"]
    room = context - len(needle) - len(question)
    end = offset + max(room, 0)
    hay = tokenizer(text[: max(end, 1) * CHARACTERS_PER_TOKEN], add_special_tokens=False)["input_ids"][offset:end]
    if room < 16 or len(hay) < room:
        raise InputError(
            f"a context of {context} tokens is too short for a needle, or longer than the text ({len(hay)} tokens)"
        )
    cut = round(depth * len(hay))
    return torch.tensor([[*hay[:cut], *needle, *hay[cut:], *question]])


def measure_needle(
    model: Any, tokenizer: Any, text: str, formats: Sequence[str], *, contexts: Sequence[int] = (512, 1024),
    depths: Sequence[float] = (0.1, 0.5, 0.9), offset: int = 0, **common: Unpack[Common],
) -> NeedleReport:  # fmt: skip
    """Greedy answers of 6 tokens with the stock cache and each format, for every context, depth and number.

    The haystack begins ``offset`` tokens into the text.
    """
    common.setdefault("mode", SERVING)
    run = Run(formats, **common)
    work, cells = list(product(contexts, depths, [STOCK, *run.kinds])), []
    for context, depth, kind in run.each(work, lambda x: f"{x[2].name} at {x[0]} tokens, depth {x[1]:.0%}"):
        found = 0
        for city, number in _CASES:
            ids = haystack(tokenizer, text, context, depth, city, number, offset)
            found += str(number) in tokenizer.decode(greedy(model, tokenizer, kind, run.mode, ids, 6))
        cells.append(NeedleCell(kind.name, context, depth, found, len(_CASES)))
    return NeedleReport(run.name, run.mode, tuple(cells), run.seconds)
