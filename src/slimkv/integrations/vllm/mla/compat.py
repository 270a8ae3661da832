"""What slimkv takes of vLLM's latent attention, which has its present form since vLLM 0.32.

Importing this module is the check: an older vLLM, and one whose parts are other ones, is refused here by its version.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import NEWEST_TESTED, VERSION, logger
from slimkv.versions import version_numbers

OLDEST = (0, 32)
FUSED_UPDATE = "fuse_rope_kvcache_cat_mla"

if version_numbers(VERSION, 2) < OLDEST:
    raise UnsupportedError(
        f"slimkv packs latent attention (MLA) in vLLM {OLDEST[0]}.{OLDEST[1]} and later, not in {VERSION}: upgrade "
        "vLLM, or serve this model with vLLM's own attention backend"
    )

try:
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
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    for owner, name in (
        (MLACommonImpl, "_compute_prefill_context"),
        (MLACommonImpl, "_concat_k_nope_k_pe"),
        (MLACommonImpl, "do_kv_cache_update"),
        (MLACommonImpl, "forward_mha"),
        (MLACommonMetadataBuilder, "_build_decode"),
        (MLAAttention, "_v_up_proj"),
        (MLAAttention, "process_weights_after_loading"),
    ):
        if not hasattr(owner, name):
            raise ImportError(f"{owner.__name__}.{name}")
except ImportError as error:
    raise UnsupportedError(
        f"latent attention of vLLM {VERSION} is not known to slimkv (tested is {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}): "
        f"it lacks {error}; install a tested version"
    ) from error

__all__ = [
    "MLAAttention",
    "MLACommonBackend",
    "MLACommonDecodeMetadata",
    "MLACommonImpl",
    "MLACommonMetadata",
    "MLACommonMetadataBuilder",
    "QueryLenSupport",
    "accumulate_mla_context_chunk",
    "call_after_loading",
    "check_layer",
    "forbid_fused_cache_updates",
    "init_mla_context_partial",
    "is_supported_spec",
]


def is_supported_spec(spec: Any) -> bool:
    """Whether layers with this cache spec hold one latent per token; subclasses may hold something else."""
    return type(spec) is MLAAttentionSpec and not spec.non_causal_multi_token_decode


def check_layer(layer: Any) -> None:
    """Raises for kinds of latent attention that may write or read the cache themselves."""
    if type(layer) is not MLAAttention:
        raise UnsupportedError(
            f"slimkv knows vLLM's own latent attention ({MLAAttention.__name__}), not {type(layer).__name__} of this "
            "model; serve it with vLLM's own attention backend"
        )


def forbid_fused_cache_updates(vllm_config: Any) -> None:
    """Switches off the compiler pass that lets the kernel of rotary embeddings write unpacked latents to the cache."""
    passes = vllm_config.compilation_config.pass_config
    if getattr(passes, FUSED_UPDATE, None):
        logger.info("slimkv: %s is switched off: latents are packed when they are stored.", FUSED_UPDATE)
    if hasattr(passes, FUSED_UPDATE):
        setattr(passes, FUSED_UPDATE, False)


def call_after_loading() -> None:
    """Lets an implementation see its layer once the layer has made its absorbed projections.

    vLLM calls ``impl.process_weights_after_loading`` before that, and nothing after it. So the layer's own method is
    followed by ``impl.absorbed_weights_ready(layer)`` where the implementation has one. It is called again whenever
    weights are loaded again.
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
