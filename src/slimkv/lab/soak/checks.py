"""The checks after a soak, each with its figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from slimkv.lab.soak.load import Counts
from slimkv.lab.soak.metrics import COUNTERS, GAUGES, slope
from slimkv.lab.soak.settings import SoakSettings

MIB = 2**20
_LEAST_SAMPLES = 9


@dataclass(frozen=True)
class Sample:
    """The server at one moment: seconds since the load began, private memory, metrics."""

    seconds: float
    memory_bytes: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Answers:
    """The fixed greedy answers, in order: before the load (twice) and after it, each from an empty prefix cache."""

    first: list[str]
    again: list[str]
    last: list[str]
    prefix_hit: list[str]  # after the load, from the prefix cache that ``last`` filled


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Memory:
    """Private memory of the server's processes: medians of the first, middle and last tenth of the samples."""

    start_mib: float
    middle_mib: float
    end_mib: float
    slope_mib_per_hour: float  # after the first third of the samples
    growth_mib: float  # the slope times the duration


def memory_of(samples: list[Sample]) -> Memory:
    """The memory figures of a load, from at least three samples."""
    values = [s.memory_bytes / MIB for s in samples]
    tenth = max(len(values) // 10, 1)
    middle = (len(values) - tenth) // 2
    later = samples[len(samples) // 3 :]
    per_second = slope([s.seconds for s in later], [s.memory_bytes / MIB for s in later])
    growth = per_second * (later[-1].seconds - later[0].seconds)
    marks = (median(values[:tenth]), median(values[middle : middle + tenth]), median(values[-tenth:]))
    return Memory(*marks, per_second * 3600, growth)


def check_requests(counts: Counts) -> Check:
    """No request failed, and some were answered."""
    detail = f"{counts.finished} answered, {counts.cancelled} cancelled by their clients, {counts.failed} failed"
    if counts.failures:
        detail += f"; first: {counts.failures[0]}"
    return Check("no request failed", counts.failed == 0 and counts.finished > 0, detail)


def check_answers(answers: Answers) -> list[Check]:
    """Greedy answers are the same when repeated, before and after the load."""
    out = []
    for name, other in (("same answers twice", answers.again), ("answers unchanged at the end", answers.last)):
        changed = [i for i, (a, b) in enumerate(zip(answers.first, other, strict=True)) if a != b]
        detail = f"{len(answers.first) - len(changed)} of {len(answers.first)} greedy answers are the same"
        if changed:
            i = changed[0]
            detail += f"; answer {i} was {answers.first[i]!r} and became {other[i]!r}"
        out.append(Check(name, not changed and any(answers.first), detail))
    return out


def check_memory(memory: Memory, samples: list[Sample], settings: SoakSettings) -> Check:
    """Memory is flat: its growth after the first third stays below the bound."""
    detail = (
        f"{memory.start_mib:.0f} / {memory.middle_mib:.0f} / {memory.end_mib:.0f} MiB at start / middle / end; grew by "
        f"{memory.growth_mib:.1f} MiB after the first third ({memory.slope_mib_per_hour:.0f} MiB an hour), at most "
        f"{settings.growth_mib:g} is accepted"
    )
    if len(samples) < _LEAST_SAMPLES:
        return Check("memory flat", False, f"only {len(samples)} samples; soak longer or sample more often")
    return Check("memory flat", memory.growth_mib <= settings.growth_mib and memory.start_mib > 0, detail)


def check_blocks(at_rest: dict[str, float], reset_worked: bool) -> Check:
    """No block is held without requests: vLLM resets its prefix cache only if every block is free."""
    usage = at_rest.get("kv_usage", math.nan)
    detail = f"KV usage {usage:.4f} at rest; vLLM {'emptied' if reset_worked else 'refused to empty'} its prefix cache"
    return Check("no block leaked", usage == 0 and reset_worked, detail)


def check_metrics(samples: list[Sample], at_rest: dict[str, float], counts: Counts, other_requests: int) -> Check:
    """All metrics exist, are finite and in range, counters never decrease, and they agree with the clients.

    ``other_requests``: requests that finished outside the load. A cancelled request may still finish first.
    """
    wrong = [f"no {name}" for name in (*GAUGES, *COUNTERS) if name not in at_rest]
    before: dict[str, float] = {}
    for sample in [*(s.metrics for s in samples), at_rest]:
        for name, value in sample.items():
            if not math.isfinite(value) or value < 0 or (name == "kv_usage" and value > 1):
                wrong.append(f"{name} is {value}")
            if name in COUNTERS and value < before.get(name, 0):
                wrong.append(f"{name} fell from {before[name]} to {value}")
            before[name] = value
    if not wrong:
        finished = at_rest["stopped"] + at_rest["length"]
        least = counts.finished + other_requests
        if not least <= finished <= least + counts.cancelled:
            wrong.append(f"{finished:.0f} requests finished by vLLM's count; clients saw {least}")
        if at_rest["generation_tokens"] < counts.tokens:
            wrong.append(f"{at_rest['generation_tokens']:.0f} tokens generated; clients received {counts.tokens}")
        for name in ("running", "waiting", "errors", "corrupted"):
            if at_rest[name]:
                wrong.append(f"{name} is {at_rest[name]:.0f} at rest")
    names = ("preemptions", "prefix_hits", "prompt_tokens", "generation_tokens")
    detail = ", ".join(f"{name} {at_rest.get(name, math.nan):.0f}" for name in names)
    return Check("metrics sane", not wrong, "; ".join(wrong[:3]) or detail)


def check_load(at_rest: dict[str, float], counts: Counts, settings: SoakSettings, other_requests: int) -> Check:
    """The load was as requested: preemptions, aborted requests and prefix hits occurred.

    vLLM does not count a request whose client hung up, unless it finished first: the rest were aborted.
    """
    missing = []
    finished = at_rest.get("stopped", 0) + at_rest.get("length", 0)
    aborted = counts.cancelled - (finished - counts.finished - other_requests)
    if settings.overcommitted and not at_rest.get("preemptions"):
        missing.append("no preemption")
    if counts.cancelled >= 20 and aborted < counts.cancelled / 2:
        missing.append(f"{counts.cancelled} clients hung up, and vLLM finished all but {aborted:.0f} of their requests")
    if counts.shared_prefix >= 20 and not at_rest.get("prefix_hits"):
        missing.append(f"{counts.shared_prefix} requests shared a prefix, but none hit the prefix cache")
    detail = (
        f"{at_rest.get('preemptions', 0):.0f} preemptions, {aborted:.0f} requests aborted, "
        f"{at_rest.get('prefix_hits', 0):.0f} tokens found in the prefix cache"
    )
    return Check("load as requested", not missing, "; ".join(missing) or detail)
