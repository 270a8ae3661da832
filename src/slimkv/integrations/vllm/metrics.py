"""Gauges on vLLM's ``/metrics`` page: the packed cache's capacity, bytes per token, and tokens in use.

vLLM loads ``CacheMetrics`` through the entry point ``vllm.stat_logger_plugins`` in its front-end process. vLLM itself
reports prefix-cache hits (``vllm:prefix_cache_hits``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from slimkv.integrations.vllm.compat import logger
from slimkv.integrations.vllm.model import layer_spec, served_model
from slimkv.integrations.vllm.page_sizes import slot_bytes
from slimkv.integrations.vllm.settings import wanted
from slimkv.spec import BF16_BYTES


@lru_cache
def _gauge(name: str, text: str) -> Any:
    """One gauge per process, shared by its engines."""
    return Gauge(f"slimkv:{name}", text, ["engine"], multiprocess_mode="mostrecent")


def bytes_per_token(vllm_config: Any) -> tuple[int, int] | None:
    """Bytes per token over all layers and KV heads, packed and in bf16; None for hybrid models."""
    model = vllm_config.model_config
    if model.is_hybrid or model.is_attention_free:
        return None
    text, served = model.hf_text_config, served_model(vllm_config)
    if model.use_mla:
        heads, key_dim, value_dim = 1, text.kv_lora_rank, text.qk_rope_head_dim
    else:
        heads = model.get_total_num_kv_heads()
        key_dim = value_dim = model.get_head_size()
    layers = [
        layer_spec(served, vllm_config, f"layers.{i}.attn", (key_dim, value_dim), model.dtype, latent=model.use_mla)[0]
        for i in range(text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0))  # Gemma 3n, Gemma 4
    ]
    raw = len(layers) * heads * (key_dim + value_dim) * BF16_BYTES
    return heads * sum(slot_bytes(spec) for spec in layers), raw


class CacheMetrics(StatLoggerBase):
    """Sets the gauges of an engine that uses slimkv."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.vllm_config, self.engine, self.tokens = vllm_config, str(engine_index), 0

    def _set(self, name: str, text: str, value: float) -> None:
        _gauge(name, text).labels(self.engine).set(value)

    def log_engine_initialized(self) -> None:
        """Sets the gauges that do not change: capacity and bytes per token."""
        cache = self.vllm_config.cache_config
        if not wanted(self.vllm_config.additional_config) or not cache.num_gpu_blocks:
            return
        self.tokens = getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size
        self._set("kv_cache_capacity_tokens", "Tokens that the KV cache holds.", self.tokens)
        sizes = bytes_per_token(self.vllm_config)
        if sizes is not None:
            packed, raw = sizes
            self._set("kv_cache_bytes_per_token", "Bytes of a token in all layers and KV heads.", packed)
            self._set("kv_cache_capacity_bytes", "Bytes of the tokens that the KV cache holds.", self.tokens * packed)
            smaller = raw / packed
            logger.info("slimkv: %d tokens, %d bytes each, %.2f times smaller than bf16", self.tokens, packed, smaller)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Sets the number of tokens in use after a step."""
        if self.tokens and scheduler_stats is not None:
            used = round(scheduler_stats.kv_cache_usage * self.tokens)
            self._set("kv_cache_used_tokens", "Tokens in the blocks that requests hold.", used)
