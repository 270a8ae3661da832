"""A cold tier for stock vLLM: the GPU cache is vLLM's own, and blocks are packed when they move to host memory."""

from slimkv.integrations.vllm.cold.spec import SlimKVOffloadingSpec

__all__ = ["SlimKVOffloadingSpec"]
