"""Multi-turn sessions in a cache that is too small for all of them: how many prompt tokens it still holds.

A user asks about one of a few shared texts (popularity follows Zipf's law), gets an answer, pauses, and asks again with
the whole conversation as the prompt. Tokens that the cache has evicted are computed again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from slimkv.memory_plan import ModelShape, sequence_bytes
from slimkv.spec import BF16_BYTES

SHARED = 0.5  # share of the context that is the shared text
USERS_PER_TEXT = 4


@dataclass
class User:
    """One conversation; times are in seconds."""

    text: int
    asks: list[list[int]]  # the user's tokens in each turn
    thinks: list[float]  # seconds before each turn
    said: list[int] = field(default_factory=list)  # the conversation so far
    turn: int = 0


class Sessions:
    """The users of a plan, the same for every engine with the same seed."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.turns, source = plan["turns"], random.Random(f"sessions-{plan['seed']}")
        words = range(3, plan["vocabulary"])
        sizes = lengths(plan["context"], plan["turns"], plan["new_tokens"])
        texts = [source.choices(words, k=sizes[0]) for _ in range(-(-plan["users"] // USERS_PER_TEXT))]
        popularity = [1 / (rank + 1) for rank in range(len(texts))]
        self.users = []
        for number in range(plan["users"]):
            text = source.choices(range(len(texts)), popularity)[0]
            asks = [source.choices(words, k=sizes[1]) for _ in range(self.turns)]
            thinks = [source.expovariate(1 / plan["think"]) for _ in range(self.turns)]
            thinks[0] = number * plan["think"] / plan["users"] + thinks[0] / 4  # users start at different times
            self.users.append(User(text, asks, thinks, list(texts[text])))
        used = {user.text for user in self.users}
        self.unseen = len(used) * sizes[0] + len(self.users) * self.turns * sizes[1]  # tokens never seen before
        self.prompt_tokens = 0

    def first(self) -> Iterator[tuple[float, int, list[int]]]:
        """(due, user, prompt) of every user's first turn."""
        for number in range(len(self.users)):
            yield self._ask(number, 0.0)

    def follow(self, number: int, answer: list[int], now: float) -> tuple[float, int, list[int]] | None:
        """The user's next turn; None after the last."""
        user = self.users[number]
        user.said = [*user.said, *answer]
        return self._ask(number, now) if user.turn < self.turns else None

    def _ask(self, number: int, now: float) -> tuple[float, int, list[int]]:
        """The conversation so far and the user's next question."""
        user = self.users[number]
        due, user.said = now + user.thinks[user.turn], [*user.said, *user.asks[user.turn]]
        user.turn += 1
        self.prompt_tokens += len(user.said)
        return due, number, user.said


def lengths(context: int, turns: int, new_tokens: int) -> tuple[int, int]:
    """Tokens of a shared text and of one question, so that the last answer ends at ``context``."""
    shared = int(context * SHARED)
    return shared, max(1, (context - shared) // turns - new_tokens)


def held_tokens(users: int, context: int, turns: int, new_tokens: int) -> int:
    """Tokens of all conversations at their end; shared texts count once."""
    shared, ask = lengths(context, turns, new_tokens)
    return -(-users // USERS_PER_TEXT) * shared + users * turns * (ask + new_tokens)


def session_bytes(settings: Any, shape: ModelShape) -> int:
    """Bytes of the cache in the sessions phase: a fraction of what all sessions need in the model's dtype."""
    held = held_tokens(settings.users, settings.context, settings.turns, settings.new_tokens)
    one = settings.context + settings.new_tokens + 128  # the least that an engine can serve, with partial blocks
    tokens = max(int(held * settings.held), one)
    return sequence_bytes(shape, "raw", tokens, 16) * getattr(torch, settings.dtype).itemsize // BF16_BYTES
