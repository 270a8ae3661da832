"""A cold tier for stock vLLM: the cache stays as vLLM's own attention keeps it, what goes to host memory is packed."""

from slimkv.integrations.vllm.cold.spec import SlimKVOffloadingSpec

__all__ = ["SlimKVOffloadingSpec"]
