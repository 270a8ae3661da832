"""The parts of SGLang (0.5.22 and later) that slimkv uses; no other module checks versions.

Importing this module checks the installation: an unsupported one raises an error with its version.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.versions import unknown_version, warn_if_newer
from slimkv.integrations.sglang.versions import NEWEST_TESTED, OLDEST, installed_version
from slimkv.versions import require_parts

VERSION = installed_version()

logger = logging.getLogger("sglang.slimkv")

try:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel

    require_parts(AttentionBackend, "init_forward_metadata_out_graph", "init_forward_metadata_in_graph")
    require_parts(DefaultPoolConfigurator, "_compute_cell_size")
    require_parts(HybridSWAPoolConfigurator, "_full_cell_bytes", "_swa_cell_bytes", "_recompute_cell_size")
    require_parts(KVCacheConfigurator, "_resolve_kv_pool_class")
    require_parts(MHATokenToKVPool, "_create_buffers", "_init_kv_copy_and_warmup", "move_kv_cache", "get_cpu_copy")
    require_parts(MLATokenToKVPool, "_create_buffers")
    for _name in ("allocation_label", "post_capture_active"):
        if _name not in inspect.signature(MHATokenToKVPool.__init__).parameters:
            raise ImportError(f"MHATokenToKVPool({_name}=...)")
except ImportError as error:
    raise unknown_version("SGLang", VERSION, OLDEST, NEWEST_TESTED, error) from error

warn_if_newer("SGLang", VERSION, NEWEST_TESTED, logger)


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
    """The tokens that a layer's queries attend, their own included, which SGLang does not count; None: all."""
    window = layer.sliding_window_size
    return window + 1 if window is not None and window > -1 else None


def full_attention_layers(kvc: Any) -> list[int] | None:
    """This stage's layers with a cache, where others are linear attention; None for a model without such layers."""
    mambaish = mambaish_config(kvc.model_config)
    if mambaish is None:
        return None
    stage = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
    return [layer for layer in mambaish.full_attention_layer_ids if layer in stage]
