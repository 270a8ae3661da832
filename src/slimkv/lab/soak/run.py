"""One soak, from starting the server to the checks."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from slimkv.lab import models
from slimkv.lab.engine_process import EngineError, log_tail
from slimkv.lab.evals.texts import load_text
from slimkv.lab.provenance import provenance
from slimkv.lab.soak import checks
from slimkv.lab.soak.checks import Answers, Check, Memory, Sample
from slimkv.lab.soak.client import Ask, BadReplyError, Client
from slimkv.lab.soak.load import Load
from slimkv.lab.soak.metrics import parse_metrics, session_memory
from slimkv.lab.soak.server import Server, serving
from slimkv.lab.soak.settings import SoakSettings

_SETTLE_SECONDS = 60.0
_TEXT_CHARACTERS = 40_000
_WARM_UP = 4  # requests before anything is measured


@dataclass(frozen=True)
class SoakReport:
    """The result of a soak."""

    settings: SoakSettings
    platform: str
    seconds: float  # duration of the load
    served: int
    requests: dict[str, Any]  # what clients saw
    latency_seconds: dict[str, float]
    memory: Memory
    sleeps: str
    metrics: dict[str, float]  # at rest, after the load
    answers: Answers
    checks: list[Check]
    samples: list[Sample]
    run: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)


@contextmanager
def _sampling(server: Server, every: float) -> Iterator[list[Sample]]:
    """Samples of the server's memory and metrics, taken by a thread until the context ends."""
    samples, stop, begin = list[Sample](), threading.Event(), time.monotonic()

    def run() -> None:
        while not stop.wait(every):
            with suppress(OSError):  # failing requests of the load show whether the server is alive
                metrics = parse_metrics(server.client.metrics())
                samples.append(Sample(time.monotonic() - begin, session_memory(server.process.pid), metrics))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def soak_server(settings: SoakSettings, step: Callable[[str], None], folder: Path | None = None) -> SoakReport:
    """Starts the server, loads it and runs the checks. ``folder`` gets the server's log; ``step`` is called with each
    stage. Raises ``EngineError`` if the server does not start or dies; other problems are in the report's checks.
    """
    model = models.source(settings.model)
    with tempfile.TemporaryDirectory(prefix="slimkv-soak-") as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        step("starting vllm serve")
        with serving(settings, model, kept) as server:
            try:
                return _soak(server, settings, step)
            except (BadReplyError, OSError) as error:
                server.check_alive()
                raise EngineError(f"the server gave an invalid answer: {error}\n{log_tail(server.log)}") from error


def _soak(server: Server, settings: SoakSettings, step: Callable[[str], None]) -> SoakReport:
    client = server.client
    text = client.tokenize(load_text()[:_TEXT_CHARACTERS])
    asks = _fixed_asks(settings, text)
    for ask in asks[:_WARM_UP]:
        client.complete(ask)
    first, again = (_answers(client, asks, empty=True) for _ in range(2))
    load = Load(settings, client, text)
    step(f"load for {settings.seconds:g} s, at most {settings.requests} requests")
    slept: list[str] = []
    times = settings.sleeps if server.can_sleep else 0
    pauses = [settings.seconds * (i + 1) / (times + 1) for i in range(times)]
    with _sampling(server, settings.sample_seconds) as samples:
        seconds = load.run(pauses, lambda: slept.append(_sleep_and_wake(client)), _progress(server, load, step))
    counts = load.counts
    step(f"{counts.served} requests served, {counts.failed} failed; waiting for the server to come to rest")
    at_rest = _settle(client)
    emptied = _emptied(client)
    answers = Answers(first, again, _answers(client, asks, empty=True), _answers(client, asks, empty=False))
    beside = 4 * len(asks) + min(_WARM_UP, len(asks))
    final = _settle(client)
    memory = checks.memory_of(samples) if len(samples) >= 3 else Memory(0, 0, 0, 0, 0)
    sleeps = f"{len(slept)} of {len(pauses)}" if pauses else f"none: no sleep mode on {server.platform}, or not asked"
    found = [
        checks.check_requests(counts),
        *checks.check_answers(answers),
        checks.check_memory(memory, samples, settings),
        checks.check_blocks(at_rest, emptied),
        checks.check_metrics(samples, final, counts, beside),
        checks.check_load(final, counts, settings, beside),
    ]
    if pauses:
        found.append(
            Check("sleeps and wakes", len(slept) == len(pauses) and not any(slept), "; ".join(slept) or sleeps)
        )
    device = "cuda" if server.platform == "cuda" else "cpu"
    requests = asdict(counts)
    waits, latency = requests.pop("seconds"), dict[str, float]()
    if len(waits) > 1:
        latency = {"p50": median(waits), "p99": quantiles(waits, n=100)[98], "max": max(waits)}
    return SoakReport(
        settings, server.platform, seconds, counts.served, requests, latency, memory, sleeps, final, answers, found,
        samples, asdict(provenance(device)),
    )  # fmt: skip


def _fixed_asks(settings: SoakSettings, text: list[int]) -> list[Ask]:
    """Greedy requests of several lengths, spread over the text."""
    out = []
    for i in range(settings.answers):
        length = max(settings.longest_prompt * (i + 1) // settings.answers, 4)
        start = (len(text) - length) * i // max(settings.answers, 1)
        most = min(settings.answer_tokens, settings.max_model_len - length)
        out.append(Ask(tuple(text[start : start + length]), most, ignore_eos=True))
    return out


def _answers(client: Client, asks: list[Ask], empty: bool) -> list[str]:
    """Runs the requests one after another, alone in their batches; from an empty prefix cache if ``empty``."""
    out = []
    for ask in asks:
        if empty and not _emptied(client):
            raise BadReplyError("vLLM does not empty its prefix cache at rest: blocks are held")
        reply = client.complete(ask)
        if reply.failure is not None:
            raise BadReplyError(f"a fixed request failed: {reply.failure}")
        out.append(reply.text)
    return out


def _emptied(client: Client) -> bool:
    return bool(client.json("POST", "/reset_prefix_cache")["success"])


def _settle(client: Client) -> dict[str, float]:
    """The metrics once nothing runs or waits and no block is in use, or after a minute."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        now = parse_metrics(client.metrics())
        if time.monotonic() > end or not any(now.get(name) for name in ("running", "waiting", "kv_usage")):
            return now
        time.sleep(0.5)


def _sleep_and_wake(client: Client) -> str:
    """Puts the server to sleep and wakes it up; returns the error, or an empty string."""
    try:
        client.json("POST", "/sleep?level=1")
        asleep = client.json("GET", "/is_sleeping")["is_sleeping"]
        client.json("POST", "/wake_up")
        awake = not client.json("GET", "/is_sleeping")["is_sleeping"]
    except (BadReplyError, OSError) as error:
        return str(error)
    return "" if asleep and awake else f"asleep after /sleep: {asleep}; awake after /wake_up: {awake}"


def _progress(server: Server, load: Load, step: Callable[[str], None]) -> Callable[[], None]:
    last = time.monotonic()

    def check() -> None:
        nonlocal last
        server.check_alive()
        if time.monotonic() - last > 30:
            last = time.monotonic()
            step(f"{load.counts.served} requests served, {load.counts.failed} failed")

    return check
