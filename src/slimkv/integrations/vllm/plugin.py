"""How vLLM finds slimkv: the ``vllm.general_plugins`` entry point, run once in each of its processes.

It names slimkv's classes and imports none of them, so that an installed slimkv costs nothing while it is not used.
"""

from __future__ import annotations

CHOICE = "slimkv.integrations.vllm.choice"  # whose names are the classes for the engine at hand
ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def register() -> None:
    """Makes ``--attention-backend CUSTOM`` mean slimkv."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{CHOICE}.CUSTOM")
    if current_platform.is_cpu():
        # There vLLM takes its CPU backends whatever was chosen, but looks up their classes by these names.
        for name in ON_CPU:
            if name in AttentionBackendEnum.__members__:
                register_backend(AttentionBackendEnum[name], f"{CHOICE}.{name}")
