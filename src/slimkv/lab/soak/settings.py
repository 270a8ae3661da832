"""The settings of a soak: model, load and limits."""

from __future__ import annotations

from dataclasses import dataclass

from slimkv.arguments import typed_fields
from slimkv.errors import InputError
from slimkv.lab.models import DTYPES
from slimkv.lab.settings import check_limits, setting
from slimkv.spec import parse_format


@typed_fields()
@dataclass(frozen=True)
class SoakSettings:
    """One soak. The load ends after ``seconds`` or ``requests``, whichever comes first."""

    model: str  # a packaged model, a folder, or a name that ``vllm serve`` finds
    format: str = setting("k4v4", "Format of the packed cache; stock: vLLM's own cache.")
    seconds: float = setting(300.0, "Duration of the load.", positive=True)
    requests: int = setting(100_000, "Maximum number of requests.", least=1)
    concurrency: int = setting(12, "Maximum number of requests in flight.", least=1)
    rate: float = setting(2.0, "Arrivals per second outside bursts.", positive=True)
    cancelled: float = setting(0.3, "Fraction of requests whose client disconnects, 0 to 0.9.", least=0, most=0.9)
    cache_tokens: int = setting(2048, "Size of the KV cache in tokens; small, so that vLLM preempts.", least=0)
    max_model_len: int = setting(768, "Maximum tokens of one request.", least=128)
    block_size: int = setting(32, least=1)
    prefixes: int = setting(4, least=1)  # shared by half of the prompts
    answers: int = setting(8, "Number of greedy answers that must not change.", least=1)
    answer_tokens: int = setting(24, least=1)
    sleeps: int = setting(2, least=0)  # how often the server is put to sleep, on platforms with sleep mode
    request_seconds: float = setting(300.0, "Time after which an unanswered request counts as failed.", positive=True)
    # Measured as the slope of a line through the samples, times the duration.
    growth_mib: float = setting(32.0, "MiB by which memory may grow after a third of the load.", positive=True)
    sample_seconds: float = setting(2.0, positive=True)  # between samples of memory and metrics
    start_seconds: float = setting(1200.0, positive=True)  # for the server's start
    dtype: str = setting("float32", "Data type of weights and activations", known=DTYPES)
    seed: int = setting(0, "Seed of the random load.", least=0)

    def __post_init__(self) -> None:
        if self.format != "stock":
            parse_format(self.format)
        check_limits(self)
        if self.cache_tokens < self.max_model_len + self.block_size:
            raise InputError(
                f"a cache of {self.cache_tokens} tokens does not hold one request of {self.max_model_len} and a block "
                f"of {self.block_size}: raise --cache-tokens or lower --max-model-len"
            )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt: three quarters of the context length."""
        return self.max_model_len * 3 // 4

    @property
    def overcommitted(self) -> bool:
        """Whether the first burst cannot fit the cache, so that vLLM must preempt."""
        return self.concurrency * self.longest_prompt > self.cache_tokens
