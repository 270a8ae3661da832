"""Features of a model or an engine that slimkv does not support; each raises an error while the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm.compat import layout_is_chosen
from slimkv.integrations.vllm.connectors import EXAMPLE_CONNECTOR, connectors
from slimkv.integrations.vllm.page_sizes import CACHE_DTYPES
from slimkv.integrations.vllm.settings import parse

OWN_BACKEND = "serve this model with vLLM's own attention backend"
LATENTS = "slimkv's latent attention"
SPARSE = (
    "slimkv packs dense latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash) and the sparse one of models "
    f"whose configuration has index_topk (DeepSeek V3.2, GLM-5), not that of this model; {OWN_BACKEND}"
)
# The arguments that vLLM passes to an implementation of latent attention.
LATENT_ARGUMENTS = frozenset(
    {
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
        "indexer", "q_pad_num_heads",
    }
)  # fmt: skip


def refuse(who: str, features: Mapping[str, Any], remedy: str = OWN_BACKEND) -> None:
    """Raises if any of ``features`` is set, that is, neither None nor False."""
    asked = [name for name, value in features.items() if value is not None and value is not False]
    if asked:
        raise UnsupportedError(f"{who} does not support {', '.join(asked)}; {remedy}")


def check_cache_dtype(kv_cache_dtype: str) -> None:
    """Raises for a cache dtype of vLLM's own."""
    if kv_cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"slimkv stores its own formats, so kv_cache_dtype must be left at auto, not {kv_cache_dtype!r}"
        )


def check_latents(
    vllm_config: Any, kv_cache_dtype: str, features: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Raises for what latent attention does not support. ``arguments``: those that only latent attention has."""
    if arguments.get("indexer") is not None or "topk_indices_buffer" in arguments:
        raise UnsupportedError(SPARSE)
    unknown = {f"the argument {name}": True for name in sorted(set(arguments) - LATENT_ARGUMENTS)}
    refuse(LATENTS, {**features, **unknown})
    check_cache_dtype(kv_cache_dtype)
    if vllm_config.model_config.is_hybrid:
        raise UnsupportedError(
            "slimkv does not pack latent attention beside state-space or linear-attention layers: vLLM sizes the "
            f"blocks of such models for unpacked latents; {OWN_BACKEND}"
        )
    parallel = vllm_config.parallel_config
    sizes = {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
    }
    refuse(LATENTS, sizes, "use tensor parallelism")
    if layout_is_chosen() and any(name == EXAMPLE_CONNECTOR for name, _ in connectors(vllm_config)):
        raise UnsupportedError(
            f"{EXAMPLE_CONNECTOR} writes latents into a copy of the cache in some layouts: unset VLLM_KV_CACHE_LAYOUT"
        )
    parse(vllm_config.additional_config).refuse("latent attention", "calibration")
