"""Acceptance of n-gram drafts (prompt lookup) with a packed cache: lower acceptance makes speculative decoding slower.

A draft repeats the tokens that followed the last n-gram earlier in the text. Greedy verification accepts the drafted
tokens that the model would generate anyway, so acceptance can be computed from text generated without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from slimkv.lab.evals.harness import STOCK, Common, Run, attending

DRAFTED, LONGEST, SHORTEST = 4, 4, 2  # tokens of a draft, and sizes of the n-grams that are looked up


@dataclass(frozen=True)
class AcceptanceRow:
    """The figures of one cache."""

    format: str
    acceptance_length: float  # mean tokens per verification step: accepted ones plus one
    over_raw: float


@dataclass(frozen=True)
class AcceptanceReport:
    """Acceptance of n-gram drafts for every cache, the stock one first."""

    model: str
    mode: str
    windows: int
    new_tokens: int
    drafted: int
    rows: tuple[AcceptanceRow, ...]
    seconds: float


def ngram_draft(tokens: Sequence[int], drafted: int = DRAFTED) -> list[int]:
    """The tokens after the previous occurrence of the longest matching n-gram of ``tokens``; empty without a match."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        tail = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == tail:
                return list(tokens[start + size : start + size + drafted])
    return []


def verifications(prompt: Sequence[int], answer: Sequence[int], drafted: int = DRAFTED) -> int:
    """Verification steps that generate ``answer`` after ``prompt`` with n-gram drafts of up to ``drafted`` tokens."""
    steps, done = 0, 0
    while done < len(answer):
        draft = ngram_draft([*prompt, *answer[:done]], drafted)
        accepted = 0
        while accepted < len(draft) and answer[done + accepted : done + accepted + 1] == [draft[accepted]]:
            accepted += 1
        done, steps = done + accepted + 1, steps + 1
    return steps


def measure_acceptance(
    model: Any, windows: Tensor, formats: Sequence[str], *, new_tokens: int = 96, **common: Unpack[Common]
) -> AcceptanceReport:
    """Greedy continuations of ``windows`` int64 [count, tokens] by ``new_tokens`` tokens with every cache."""
    run, windows = Run(formats, **common), windows.to(model.device)
    kinds = [STOCK, *run.kinds]
    lengths: dict[str, float] = {}
    for kind in run.each(kinds, lambda kind: kind.name):
        with attending(model, kind.format), torch.no_grad():
            out = model.generate(
                windows, attention_mask=torch.ones_like(windows), past_key_values=kind.new(model, run.mode),
                max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        answers = out[:, windows.shape[1] :].tolist()
        steps = sum(verifications(window, answer) for window, answer in zip(windows.tolist(), answers, strict=True))
        lengths[kind.name] = sum(map(len, answers)) / steps
    rows = tuple(AcceptanceRow(name, length, length / lengths[STOCK.name]) for name, length in lengths.items())
    return AcceptanceReport(run.name, run.mode, len(windows), new_tokens, DRAFTED, rows, run.seconds)
