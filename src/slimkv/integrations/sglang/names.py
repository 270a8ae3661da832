"""Names shared by SGLang's processes. Every process imports this module, so importing it loads nothing else."""

from __future__ import annotations

from typing import Any

BACKEND = "slimkv"  # the name of the attention backend
LISTENING = "SLIMKV_SGLANG_LISTENS"  # set in the environment while ``slimkv calibrate`` runs an engine
# The function that builds the host pool of the hierarchical cache
HOST_POOL = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.build_kv_host_pool"


def is_chosen(server_args: Any) -> bool:
    """Whether slimkv is the attention backend of prefill or decode."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    return BACKEND in attention_backends_of(resolved_view(server_args))


def has_settings(server_args: Any) -> bool:
    """Whether the server's arguments mention slimkv; if not, its other modules need not be imported."""
    return BACKEND in str(server_args.json_model_override_args or "")


def cold_settings(server_args: Any) -> Any:
    """``settings.cold``, without importing it if the arguments do not mention slimkv."""
    if not has_settings(server_args):
        return None
    from slimkv.integrations.sglang import settings

    return settings.cold(server_args)
