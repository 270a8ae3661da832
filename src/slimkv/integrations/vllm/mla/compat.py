"""The parts of vLLM's latent attention that slimkv uses."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import logger

FUSED_SPARSE = "vllm.models.deepseek_v32.attention"  # DeepSeek V3.2 and GLM-5 on CUDA


def is_supported_spec(spec: Any) -> bool:
    """Whether layers with this cache spec store one latent per token; a subclass may store something else."""
    return type(spec) is MLAAttentionSpec and not spec.non_causal_multi_token_decode


def check_layer(layer: Any, impl: Any) -> None:
    """Raises for kinds of latent attention that may access the cache themselves."""
    if impl.is_sparse and type(layer).__module__ == FUSED_SPARSE:
        _store_through(layer, impl)
    elif type(layer) is not MLAAttention:
        raise UnsupportedError(
            f"slimkv knows vLLM's own latent attention ({MLAAttention.__name__}), not {type(layer).__name__} of this "
            "model; serve it with vLLM's own attention backend"
        )


def _store_through(layer: Any, impl: Any) -> None:
    """Lets ``impl`` store a layer's latents; otherwise a fused norm-and-rope kernel writes them unpacked.

    For caches in host memory, vLLM calls ``update_kv_cache`` instead, so the layer gets a placeholder for one.
    """

    def update(
        latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, step: Any, dtype: str, scale: Tensor
    ) -> None:
        impl.do_kv_cache_update(latent, rope, cache, slots, dtype, scale)

    layer.hisparse_cache, layer.update_kv_cache = SimpleNamespace(runtime=None), update


def global_slots(positions: Tensor, requests: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Slots, int32 [tokens, positions], of the positions that queries attend to; -1 where a position is -1.

    positions int32 [tokens, positions], within the request; requests int32 [tokens], rows of block_table.
    """
    if positions.is_cuda:
        from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

        slots: Tensor = triton_convert_req_index_to_global_index(
            requests, block_table, positions, BLOCK_SIZE=block_size, NUM_TOPK_TOKENS=positions.shape[1]
        )
        return slots
    block = block_table[requests.long()[:, None], positions.clamp(min=0).long() // block_size]
    return torch.where(positions < 0, -1, block * block_size + positions % block_size)


def forbid_fused_cache_updates(vllm_config: Any) -> None:
    """Switches off the compiler pass that fuses rotary embeddings with writing unpacked latents to the cache."""
    passes = vllm_config.compilation_config.pass_config
    if passes.fuse_rope_kvcache_cat_mla:
        logger.info("slimkv: fuse_rope_kvcache_cat_mla is switched off: latents are packed when they are stored.")
    passes.fuse_rope_kvcache_cat_mla = False


def call_after_loading() -> None:
    """Calls ``impl.absorbed_weights_ready(layer)``, if it exists, once a layer has its absorbed projections.

    vLLM calls ``impl.process_weights_after_loading`` before that and nothing after it, so this wraps the layer's own
    method. The call is repeated whenever weights are reloaded.
    """
    original = MLAAttention.process_weights_after_loading
    if getattr(original, "_slimkv", False):
        return

    @wraps(original)
    def process_weights_after_loading(self: Any, act_dtype: Any) -> None:
        original(self, act_dtype)
        ready = getattr(self.impl, "absorbed_weights_ready", None)
        if ready is not None:
            ready(self)

    process_weights_after_loading._slimkv = True  # type: ignore[attr-defined]
    MLAAttention.process_weights_after_loading = process_weights_after_loading
