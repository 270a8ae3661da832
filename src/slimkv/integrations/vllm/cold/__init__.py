"""A cold tier for stock vLLM: vLLM's own cache is unchanged, and blocks that go to host memory are packed."""

from slimkv.integrations.vllm.cold.spec import SlimKVOffloadingSpec

__all__ = ["SlimKVOffloadingSpec"]
