"""Random requests, and the threads that send them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from slimkv.lab.soak.client import Ask, Client
from slimkv.lab.soak.settings import SoakSettings

_BURST = 0.04  # share of arrivals that start a burst
_KEPT_FAILURES = 20


@dataclass
class Counts:
    """The outcomes that clients saw."""

    finished: int = 0
    streamed: int = 0
    cancelled: int = 0
    failed: int = 0
    shared_prefix: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    bursts: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # latency of each finished request

    @property
    def served(self) -> int:
        """Requests that ended as expected: answered, or cancelled by their client."""
        return self.finished + self.cancelled


def random_asks(settings: SoakSettings, text: list[int]) -> Iterator[tuple[float, Ask, bool]]:
    """An endless stream of (delay in seconds, request, whether its prefix is shared), determined by the seed.

    The first ``concurrency`` requests are long, arrive at once and are not cancelled. They do not fit an
    overcommitted cache, so vLLM preempts in every such soak.
    """
    chance = random.Random(settings.seed)
    longest = settings.longest_prompt
    prefixes = []
    for _ in range(settings.prefixes):
        length = chance.randint(settings.block_size, max(longest // 2, settings.block_size))
        start = chance.randrange(max(len(text) - length, 1))
        prefixes.append(text[start : start + length])
    for _ in range(settings.concurrency):
        yield 0.0, Ask(_piece(chance, text, longest), settings.max_model_len - longest, ignore_eos=True), False
    burst = 0
    while True:
        shared = chance.random() < 0.5
        prefix = chance.choice(prefixes) if shared else []
        prompt = (*prefix, *_piece(chance, text, int(longest ** chance.random())))[:longest]
        most = settings.max_model_len - len(prompt)
        stream = chance.random() < 0.5
        hang_up = chance.randint(0, 12) if chance.random() < settings.cancelled else None
        ask = Ask(
            prompt, chance.randint(1, min(most, 96)), stream, hang_up, chance.choice((0.0, 0.0, 0.7, 1.5)),
            chance.random() < 0.25, chance.random() < 0.5, chance.randrange(2**31),
        )  # fmt: skip
        if burst == 0 and chance.random() < _BURST:
            burst = settings.concurrency
        burst = max(burst - 1, 0)
        yield (0.0 if burst else chance.expovariate(settings.rate)), ask, shared


def _piece(chance: random.Random, text: list[int], length: int) -> tuple[int, ...]:
    start = chance.randrange(max(len(text) - length, 1))
    return tuple(text[start : start + max(length, 1)])


class Load:
    """Sends requests until the time or the number is reached, at most ``concurrency`` at a time."""

    def __init__(self, settings: SoakSettings, client: Client, text: list[int]) -> None:
        self.counts = Counts()
        self._settings = settings
        self._client = client
        self._text = text
        self._idle = threading.Condition()
        self._in_flight = 0

    def run(self, pauses: list[float], pause: Callable[[], None], check: Callable[[], None]) -> float:
        """Sends the requests; returns the seconds taken. At each of ``pauses`` (seconds), drains and calls ``pause()``.

        ``check()`` is called before every request, and may raise.
        """
        begin, left, limit = time.monotonic(), sorted(pauses), self._settings.concurrency
        with ThreadPoolExecutor(limit) as pool:
            for number, (gap, ask, shared) in enumerate(random_asks(self._settings, self._text)):
                elapsed = time.monotonic() - begin
                if elapsed >= self._settings.seconds or number >= self._settings.requests:
                    break
                check()
                if left and elapsed >= left[0]:
                    left.pop(0)
                    self._wait(0)
                    pause()
                time.sleep(min(gap, 30.0))
                self._wait(limit - 1)
                with self._idle:
                    self._in_flight += 1
                    self.counts.shared_prefix += shared
                    self.counts.bursts += gap == 0.0
                pool.submit(self._send, ask)
            self._wait(0)
        return time.monotonic() - begin

    def _wait(self, at_most: int) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._in_flight <= at_most)

    def _send(self, ask: Ask) -> None:
        reply, counts = self._client.complete(ask), self.counts
        with self._idle:
            if reply.failure is not None:
                counts.failed += 1
                if len(counts.failures) < _KEPT_FAILURES:
                    asked = f"prompt of {len(ask.prompt)}, max_tokens {ask.max_tokens}, stream {ask.stream}"
                    counts.failures.append(f"{reply.failure} ({asked})")
            elif reply.cancelled:
                counts.cancelled += 1
            else:
                counts.finished += 1
                counts.streamed += ask.stream
                counts.prompt_tokens += reply.prompt_tokens
                counts.tokens += reply.tokens
                counts.seconds.append(reply.seconds)
            self._in_flight -= 1
            self._idle.notify_all()
