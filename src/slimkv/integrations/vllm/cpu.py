"""Which backend vLLM gets on a CPU: slimkv's where the user chose it, and vLLM's own otherwise.

vLLM looks up ``CPU_ATTN`` here when a layer is made, with the engine's config at hand.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "CPU_ATTN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config

    from slimkv.errors import InputError
    from slimkv.integrations.vllm.settings import EXAMPLE, wanted

    config = get_current_vllm_config()
    chosen = getattr(config.attention_config.backend, "name", None) == "CUSTOM"
    if chosen:
        from slimkv.integrations.vllm.backend import SlimKVBackend

        return SlimKVBackend
    if wanted(config.additional_config):
        raise InputError(f"the additional config has settings for slimkv, which is not switched on; use {EXAMPLE}")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
