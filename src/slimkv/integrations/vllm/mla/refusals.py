"""Unsupported features of latent attention; each raises an error while the engine starts."""

from __future__ import annotations

from typing import Any

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm.compat import layout_is_chosen
from slimkv.integrations.vllm.connectors import EXAMPLE_CONNECTOR, connectors
from slimkv.integrations.vllm.page_sizes import CACHE_DTYPES
from slimkv.integrations.vllm.settings import parse

SPARSE = (
    "slimkv packs dense latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash) and the sparse one of models "
    "whose configuration has index_topk (DeepSeek V3.2, GLM-5), not that of this model; serve it with vLLM's own "
    "attention backend"
)
# The arguments that vLLM passes to an implementation of latent attention.
KNOWN_ARGUMENTS = frozenset(
    {
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
        "indexer", "q_pad_num_heads",
    }
)  # fmt: skip


def refuse(vllm_config: Any, kv_cache_dtype: str, asked: list[str], mla: dict[str, Any]) -> None:
    """Raises for features of a model or an engine that slimkv's latent attention does not support."""
    if mla.get("indexer") is not None or "topk_indices_buffer" in mla:
        raise UnsupportedError(SPARSE)
    if asked:
        raise UnsupportedError(f"slimkv's latent attention has no {', '.join(asked)}")
    unknown = set(mla) - KNOWN_ARGUMENTS
    if unknown:
        raise UnsupportedError(
            f"slimkv does not know what this model asks of latent attention: {', '.join(sorted(unknown))}"
        )
    if kv_cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"slimkv stores its own formats, so kv_cache_dtype must be left at auto, not {kv_cache_dtype!r}"
        )
    if vllm_config.model_config.is_hybrid:
        raise UnsupportedError(
            "slimkv does not pack latent attention beside state-space or linear-attention layers: vLLM sizes the "
            "blocks of such models for unpacked latents; serve this model with vLLM's own attention backend"
        )
    parallel = vllm_config.parallel_config
    for name, size in (
        ("decode context parallelism", parallel.decode_context_parallel_size),
        ("prefill context parallelism", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise UnsupportedError(f"slimkv's latent attention does not run under {name}; use tensor parallelism")
    if layout_is_chosen() and any(name == EXAMPLE_CONNECTOR for name, _ in connectors(vllm_config)):
        raise UnsupportedError(
            f"{EXAMPLE_CONNECTOR} writes latents into a copy of the cache in some layouts: unset VLLM_KV_CACHE_LAYOUT"
        )
    settings = parse(vllm_config.additional_config)
    settings.refuse("latent attention", "calibration")
