"""One engine under load, in a separate process: ``python -m slimkv.lab.bench.serve_engine PLAN RESULT``.

The result is written after every phase, so that earlier phases survive a failure.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimkv.lab.bench.sessions import Sessions

LOADS = {"vllm": "VLLMLoad", "sglang": "SGLangLoad"}


@dataclass(frozen=True)
class Answer:
    """The result of one request; times are seconds of the engine's clock."""

    tokens: int
    first_token: float
    last_token: float
    due: float = 0.0  # when the request was due


# (number of an arrival, its answer's tokens, seconds) -> the next arrival, or None
Follow = Callable[[int, list[int], float], tuple[float, list[int]] | None]


class Load(ABC):
    """An engine and its requests; token ids are random, so prefixes are not shared by accident."""

    kv_tokens: int
    block_size: int

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        start = time.perf_counter()
        self.start()
        self.start_seconds = time.perf_counter() - start

    @abstractmethod
    def start(self) -> None:
        """Starts the engine of the plan and reads ``kv_tokens`` and ``block_size`` from it."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], tokens: int) -> list[Answer]:
        """Greedy answers of exactly ``tokens`` tokens."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """``preemptions``, ``prefix_hits`` (tokens), ``verified`` drafts and ``accepted`` tokens since the start."""

    @abstractmethod
    def serve_arrivals(
        self, arrivals: list[tuple[float, list[int]]], tokens: int, follow: Follow | None = None
    ) -> list[Answer]:
        """Answers to prompts that arrive at given times, in seconds from the start.

        ``follow`` may return another arrival for each answer. Answers are in the order of their arrivals.
        """

    def stop(self) -> None:  # noqa: B027
        """Ends the engine's processes."""

    def prompt(self, number: int, length: int) -> list[int]:
        """The same tokens for the same number and length."""
        source = random.Random(f"{self.plan['seed']}-{number}-{length}")
        return source.choices(range(3, self.plan["vocabulary"]), k=length)

    def together(self, count: int) -> dict[str, Any]:
        """Prefills ``count`` requests of the plan's context, repeats them from the prefix cache, then decodes them.

        Decoding starts from the prefix cache too, so no request waits for another's prefill. The rate is the sum of the
        requests' rates between their first and last token.
        """
        prompts = [self.prompt(i, self.plan["context"]) for i in range(count)]
        start = time.perf_counter()
        self.generate(prompts, 1)
        prefill = time.perf_counter() - start
        before, start = self.counters(), time.perf_counter()
        self.generate(prompts, 1)
        cached = time.perf_counter() - start
        answers = self.generate(prompts, self.plan["new_tokens"])
        after = self.counters()
        more = {name: after[name] - before[name] for name in after}
        rates = [(a.tokens - 1) / (a.last_token - a.first_token) for a in answers]
        return {
            "requests": count,
            "context": self.plan["context"],
            "output": self.plan["new_tokens"],
            "prefill_seconds": prefill,
            "cached_seconds": cached,
            "decode_tokens_per_second": sum(rates),
            "milliseconds_per_token": 1000 / statistics.median(rates),
            "preemptions": more["preemptions"],
            "prefix_hit_share": more["prefix_hits"] / (2 * count * self.plan["context"]),
            "acceptance_length": 1 + more["accepted"] / more["verified"] if more["verified"] else None,
        }

    def warm_up(self) -> None:
        """Runs the plan's lengths twice, to compile both prefill and prefix-cache hits before anything is timed."""
        lengths = [self.plan["context"], 40, self.plan["context"] // 4]
        prompts = [self.prompt(-1 - i, max(n, 8)) for i, n in enumerate(lengths)]
        for _ in range(2):
            self.generate(prompts, 8)

    def phase_decode(self) -> dict[str, Any]:
        """``together`` with the plan's number of requests."""
        return self.together(self.plan["requests"])

    def phase_full(self) -> dict[str, Any]:
        """``together`` with as many requests as the cache holds at once."""
        each = -(-(self.plan["context"] + self.plan["new_tokens"]) // self.block_size) * self.block_size
        most = self.plan["max_num_seqs"]
        fit = min(self.kv_tokens // each - 1, most, self.plan["most_requests"] or most)
        return self.together(max(1, fit))

    def phase_poisson(self) -> dict[str, Any]:
        """Requests of mixed lengths at random times."""
        source = random.Random(self.plan["seed"])
        arrivals, now = [], 0.0
        for number in range(self.plan["arrivals"]):
            now += source.expovariate(self.plan["rate"])
            length = round(min(self.plan["context"], source.lognormvariate(0, 0.6) * self.plan["context"] / 4))
            arrivals.append((now, self.prompt(10_000 + number, max(8, length))))
        tokens = sum(len(prompt) for _, prompt in arrivals)
        return {"rate": self.plan["rate"], "prompt_tokens": tokens, **self._served(arrivals)}

    def phase_sessions(self) -> dict[str, Any]:
        """Multi-turn sessions: see ``slimkv.lab.bench.sessions``."""
        sessions = Sessions(self.plan)
        who: list[int] = []  # the user of each arrival

        def noted(turn: tuple[float, int, list[int]] | None) -> tuple[float, list[int]] | None:
            if turn is None:
                return None
            who.append(turn[1])
            return turn[0], turn[2]

        arrivals = [noted(turn) for turn in sorted(sessions.first())]
        before = self.counters()
        served = self._served(arrivals, lambda n, answer, now: noted(sessions.follow(who[n], answer, now)))
        after = self.counters()
        hits = after["prefix_hits"] - before["prefix_hits"]
        return {
            "users": self.plan["users"],
            "turns": self.plan["turns"],
            "prompt_tokens": sessions.prompt_tokens,
            "hit_share": hits / sessions.prompt_tokens,
            "recomputed_tokens": sessions.prompt_tokens - hits - sessions.unseen,
            "preemptions": after["preemptions"] - before["preemptions"],
            **served,
        }

    def _served(self, arrivals: list[Any], follow: Follow | None = None) -> dict[str, Any]:
        """Latencies and throughput of arrivals and follow-ups."""
        start = time.perf_counter()
        answers = self.serve_arrivals(arrivals, self.plan["new_tokens"], follow)
        total = time.perf_counter() - start
        waits = sorted(a.first_token - a.due for a in answers)
        between = sorted((a.last_token - a.first_token) / (a.tokens - 1) for a in answers)
        return {
            "requests": len(answers),
            "seconds": total,
            "output_tokens_per_second": sum(a.tokens for a in answers) / total,
            **{f"time_to_first_token_p{p}": percentile(waits, p) for p in (50, 99)},
            **{f"time_per_output_token_p{p}": percentile(between, p) for p in (50, 99)},
        }


def percentile(ordered: list[float], percent: int) -> float:
    """The percentile of sorted numbers, by nearest rank."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def main() -> None:
    """Runs a plan."""
    plan, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    result: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        result.update(more)
        target.write_text(json.dumps(result))

    def say(message: str) -> None:
        print(f"{plan['system']}: {message}", file=sys.stderr, flush=True)

    module = importlib.import_module(f"slimkv.lab.bench.serve_{plan['engine']}")
    load: Load = getattr(module, LOADS[plan["engine"]])(plan)
    say(f"started in {load.start_seconds:.1f} s, the cache holds {load.kv_tokens:,} tokens")
    keep(start_seconds=load.start_seconds, kv_tokens=load.kv_tokens, block_size=load.block_size)
    load.warm_up()
    for phase in plan["phases"]:
        begin = time.perf_counter()
        keep(**{phase: getattr(load, f"phase_{phase}")()})
        say(f"{phase} in {time.perf_counter() - begin:.1f} s: {json.dumps(result[phase])}")
    load.stop()


if __name__ == "__main__":
    main()
