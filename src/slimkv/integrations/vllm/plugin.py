"""How vLLM finds slimkv: the ``vllm.general_plugins`` entry point, run once in each of its processes.

It only names slimkv's classes, so an installed but unused slimkv costs nothing.
"""

from __future__ import annotations

CHOICE = "slimkv.integrations.vllm.choice"  # its attributes are the classes for the current engine
ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def register() -> None:
    """Makes ``--attention-backend CUSTOM`` mean slimkv."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{CHOICE}.CUSTOM")
    if current_platform.is_cpu():
        # On a CPU, vLLM always takes its CPU backends, but looks up their classes by these names.
        for name in ON_CPU:
            if name in AttentionBackendEnum.__members__:
                register_backend(AttentionBackendEnum[name], f"{CHOICE}.{name}")
