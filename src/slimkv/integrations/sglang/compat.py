"""The parts of SGLang that slimkv uses; no other module checks versions.

Importing this module checks the installation: any release but the tested one raises an error with its version.
"""

from __future__ import annotations

import logging
from typing import Any

from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.versions import installed_version

VERSION = installed_version()

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view  # noqa: E402
from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: E402
from sglang.srt.configs.model_config import is_deepseek_dsa  # noqa: E402
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.runtime_context import get_parallel, get_server_args  # noqa: E402

logger = logging.getLogger("sglang.slimkv")


def server_options(server_args: Any) -> Any:
    """The server's arguments after SGLang resolved their defaults."""
    return resolved_view(server_args)


def is_disaggregated(server_args: Any) -> bool:
    """Whether prefill and decode run in different engines."""
    return getattr(server_options(server_args), "disaggregation_mode", None) not in (None, "null")


def check_hooks(targets: tuple[str, ...]) -> None:
    """Raises unless SGLang patched all of ``targets``; SGLang itself only logs a hook that fails."""
    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:
        raise UnsupportedError(
            f"SGLang did not install slimkv's hooks on {', '.join(missing)}; its log says why. Without them the "
            "cache would have the wrong size"
        )


def attention_tp() -> tuple[int, int]:
    """This process's rank among those that share the heads of attention, and how many there are."""
    parallel = get_parallel()
    return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)


def window_of(layer: Any) -> int | None:
    """The number of tokens that a query attends to, including its own, which SGLang does not count; None: all."""
    window = layer.sliding_window_size
    return window + 1 if window is not None and window > -1 else None


def full_attention_layers(kvc: Any) -> list[int] | None:
    """This stage's full-attention layers in a model that also has linear attention; None for other models."""
    mambaish = mambaish_config(kvc.model_config)
    if mambaish is None:
        return None
    stage = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
    return [layer for layer in mambaish.full_attention_layer_ids if layer in stage]
