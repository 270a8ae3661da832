"""The settings of a soak: model, load and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slimkv.errors import InputError
from slimkv.spec import parse_format

MAX_SECONDS = 24 * 3600.0
MAX_REQUESTS = 1_000_000
_COUNTS = ("requests", "concurrency", "max_model_len", "block_size", "prefixes", "answers", "answer_tokens")


@dataclass(frozen=True)
class SoakSettings:
    """One soak.

    Attributes:
        model: a packaged model, a folder, or a name that ``vllm serve`` finds.
        format: slimkv's format; ``stock`` serves vLLM's own cache, to compare with.
        seconds, requests: the load ends at whichever comes first.
        concurrency: requests in flight at most.
        rate: arrivals per second outside bursts.
        cancelled: share of the requests whose client hangs up.
        cache_tokens: of the KV cache. Below what ``concurrency`` requests need, so that vLLM preempts.
        prefixes: prompts begin with one of so many shared prefixes, half of the time.
        answers, answer_tokens: greedy answers that must not change, and their length.
        sleeps: how often the server is put to sleep and woken, where the platform can.
        growth_mib: what the server's private memory may grow by after the first third of the load (a line through the
            samples' medians, over the rest of the time).
        sample_seconds: between samples of memory and metrics.
        request_seconds: a request without an answer after this time has failed.
        start_seconds: for the server's start.
        dtype: of the weights and activations.
    """

    model: str
    format: str = "k4v4"
    seconds: float = 300.0
    requests: int = 100_000
    concurrency: int = 12
    rate: float = 2.0
    cancelled: float = 0.3
    cache_tokens: int = 2048
    max_model_len: int = 768
    block_size: int = 32
    prefixes: int = 4
    answers: int = 8
    answer_tokens: int = 24
    sleeps: int = 2
    growth_mib: float = 32.0
    sample_seconds: float = 2.0
    request_seconds: float = 300.0
    start_seconds: float = 1200.0
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.format != "stock":
            parse_format(self.format)
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer of at least 1, not {value!r}")
        for name in ("seconds", "rate", "growth_mib", "sample_seconds", "request_seconds", "start_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InputError(f"{name} must be a positive number, not {getattr(self, name)}")
        if self.seconds > MAX_SECONDS or self.requests > MAX_REQUESTS:
            raise InputError(
                f"a soak of {self.seconds:g} s and {self.requests} requests has no sensible end; at most "
                f"{MAX_SECONDS:g} s and {MAX_REQUESTS} requests"
            )
        if not 0 <= self.cancelled <= 0.9:
            raise InputError(f"cancelled must be a share between 0 and 0.9, not {self.cancelled}")
        if isinstance(self.sleeps, bool) or not isinstance(self.sleeps, int) or self.sleeps < 0:
            raise InputError(f"sleeps must be an integer of 0 or more, not {self.sleeps!r}")
        if self.max_model_len < 128:
            raise InputError(f"max_model_len must be at least 128 for prompts of several lengths: {self.max_model_len}")
        if self.cache_tokens < self.max_model_len + self.block_size:
            raise InputError(
                f"a cache of {self.cache_tokens} tokens does not hold one request of {self.max_model_len} and a block "
                f"of {self.block_size}: raise cache_tokens or lower max_model_len"
            )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt: three quarters of the context length."""
        return self.max_model_len * 3 // 4

    @property
    def overcommitted(self) -> bool:
        """Whether the first burst cannot fit the cache, so that vLLM must preempt."""
        return self.concurrency * self.longest_prompt > self.cache_tokens
