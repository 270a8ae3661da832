"""How a model answers the questions about a context, with a cache of any kind, in transformers."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slimkv.lab.evals.harness import STRICT, CacheKind, attending
from slimkv.lab.suite.tasks import Context, Question


class Answer(NamedTuple):
    """Whether greedy decoding begins with the answer, and the answer's negative log-likelihood in nats."""

    exact: bool
    nll: float | None  # None: the engine does not report it


@torch.no_grad()
def answer_context(model: Any, kind: CacheKind, context: Context, chunk: int = 512) -> list[Answer]:
    """Reads the context once, in passes of ``chunk`` tokens, and each question from a copy of that cache.

    Attention reads every key and value through the codec. Greedy decoding begins with the answer's tokens if and only
    if each of them is the most likely one after the question and the previous tokens, so one pass over question and
    answer is enough.
    """
    cache = kind.new(model, STRICT)
    with attending(model, kind.format):
        for first in range(0, len(context.prefix), chunk):
            part = _ids(context.prefix[first : first + chunk], model)
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [_answer(model, copy.deepcopy(cache), question) for question in context.questions]


def _ids(tokens: tuple[int, ...], model: Any) -> Tensor:
    return torch.tensor([tokens], dtype=torch.int64, device=model.device)


def _answer(model: Any, cache: Any, question: Question) -> Answer:
    count = len(question.answer)
    given = _ids(question.suffix + question.answer[:-1], model)
    logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=count).logits[0].float()
    expected = _ids(question.answer, model)[0]
    nll = cross_entropy(logits, expected, reduction="sum")
    return Answer(bool((logits.argmax(-1) == expected).all()), float(nll))
