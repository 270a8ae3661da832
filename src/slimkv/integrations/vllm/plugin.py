"""How vLLM finds slimkv: the ``vllm.general_plugins`` entry point, run once in each of its processes.

It names slimkv's classes and imports none of them, so that an installed slimkv costs nothing while it is not used.
"""

from __future__ import annotations

BACKEND = "slimkv.integrations.vllm.backend.SlimKVBackend"
ON_CPU = "slimkv.integrations.vllm.cpu.CPU_ATTN"


def register() -> None:
    """Makes ``--attention-backend CUSTOM`` mean slimkv."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu():
        # There vLLM takes its CPU backend whatever was chosen, but looks up its class by this name.
        register_backend(AttentionBackendEnum.CPU_ATTN, ON_CPU)
