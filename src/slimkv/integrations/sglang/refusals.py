"""Checks at start-up: rejects options and layers that would bypass slimkv's pages or that it does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.model import OTHER_WEIGHTS
from slimkv.integrations.sglang import compat
from slimkv.integrations.sglang.names import BACKEND
from slimkv.spec import BLOCK_SIZES, TILE_TOKENS

PAGE_SIZES = tuple(size for size in BLOCK_SIZES if size >= TILE_TOKENS)
CACHE_DTYPES = ("auto", "bf16", "bfloat16")
# Algorithms whose drafts are chains if topk is 1, and those among them without a draft model.
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK", "NGRAM")
WITHOUT_MODEL = ("NGRAM",)
DRAFT_BACKEND = (
    "the draft has its own cache in the model's dtype: name the backend that reads it, as in "
    "--speculative-draft-attention-backend fa3"
)
HOST_LAYOUT = "layer_first"
MAX_HEAD_DIM = 512  # limit of the kernels' registers

_OWN_POOL = "it keeps K and V in its own pools"
_MOVES_KV = "it moves K and V as separate tensors of tokens"
# Options that must have one of these values, and the reason.
_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_unified_memory": ((False, None), _OWN_POOL),
    "enable_kv_cache_sharding": ((False, None), _OWN_POOL),
    "enable_page_major_kv_layout": ((False, None), _OWN_POOL),
    "prefill_only_disable_kv_cache": ((False, None), "there is no cache to pack"),
    "hicache_storage_backend": ((None,), "the stored bytes do not record their format"),
    "enable_hisparse": ((False, None), _MOVES_KV),
    "enable_lmcache": ((False, None), _MOVES_KV),
    "enable_flexkv": ((False, None), _MOVES_KV),
    "enable_unified_cache_external_linker": ((False, None), _MOVES_KV),
    "kv_canary": (("none", None), "it checks K and V as tensors of tokens"),
    "enable_two_batch_overlap": ((False, None), "it is not tested with slimkv"),
    "enable_pdmux": ((False, None), "it is not tested with slimkv"),
    "enable_prefill_cp": ((False, None), "ranks would share the tokens of a sequence"),
    "enable_mis": ((False, None), "items of one prompt would not attend to one another"),
    "dllm_algorithm": ((None,), "diffusion models attend in both directions"),
    "speculative_adaptive": ((False, None), "the number of verified tokens would change"),
    "enable_nvidia_megakernel": ((False, None), "it bypasses the attention backend"),
    "enable_amd_monokernel": ((False, None), "it bypasses the attention backend"),
}
# The same, if prefill and decode run in different engines.
_UNTESTED = "it is not tested with packed pages that travel between engines"
_TRANSFER_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "disaggregation_transfer_backend": (("nixl",), "other transports send K and V apart, or have not been tested"),
    "disaggregation_decode_enable_offload_kvcache": ((False, None), _UNTESTED),
    "disaggregation_decode_enable_radix_cache": ((False, None), _UNTESTED),
    "disaggregation_decode_host_receive_threshold": ((1, None), _UNTESTED),
    "disaggregation_enable_kv_checksum": ((False, None), _UNTESTED),
    "enable_pd_role_switch": ((False, None), _UNTESTED),
    "enable_hierarchical_cache": ((False, None), _UNTESTED),
    "enable_dp_attention": ((False, None), _UNTESTED),
    "pp_size": ((1,), _UNTESTED),
    "speculative_algorithm": ((None,), _UNTESTED),
}
# The same, for a cold tier under SGLang's own attention.
_COLD_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    **{name: rule for name, rule in _OPTIONS.items() if rule[1] in (_OWN_POOL, _MOVES_KV)},
    "hicache_storage_backend": _OPTIONS["hicache_storage_backend"],
    "enable_hierarchical_cache": ((True,), "packed pages are in the host memory of the hierarchical cache"),
    "hicache_mem_layout": ((HOST_LAYOUT,), "packed pages have a layout of their own"),
    "hicache_write_policy": (
        ("write_through", "write_through_selective"),
        "it writes the ends of prompts first, and the first pages that are written determine the key offset",
    ),
    "hicache_host_memory_mode": (("cache",), "host memory that only buffers gains nothing from packing"),
    "enable_deterministic_inference": ((False, None), "answers would depend on which pages had left the GPU"),
    "kv_cache_dtype": (CACHE_DTYPES, "K and V are packed from the model's dtype"),
    "page_size": ((64, *PAGE_SIZES), "pages of host memory are packed as a whole"),
    "disaggregation_mode": (("null", None), "it is not tested with packed host memory"),
    "speculative_algorithm": ((None,), "a drafter's cache would not be packed"),
}


def flag(name: str) -> str:
    """``page_size`` -> ``--page-size``."""
    return "--" + name.replace("_", "-")


def check_options(server_args: Any) -> None:
    """Raises for server arguments that slimkv does not support."""
    options = compat.server_options(server_args)
    prefill, decode = compat.attention_backends_of(options)
    if prefill != BACKEND or decode != BACKEND:
        raise InputError(
            f"only slimkv's attention reads slimkv's pages, but prefill uses {prefill!r} and decode {decode!r}; "
            f"use --attention-backend {BACKEND} without --prefill-attention-backend and --decode-attention-backend"
        )
    if options.page_size not in PAGE_SIZES:
        raise InputError(
            f"--page-size {options.page_size} does not fit slimkv's pages; use one of "
            f"{', '.join(map(str, PAGE_SIZES))}; 64 is best"
        )
    if options.kv_cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"slimkv stores its own formats, so --kv-cache-dtype must be left at auto, not {options.kv_cache_dtype!r}"
        )
    transfer = _TRANSFER_OPTIONS if compat.is_disaggregated(server_args) else {}
    _check_values(options, {**_OPTIONS, **transfer})
    if getattr(options, "enable_hierarchical_cache", False) and options.hicache_mem_layout != HOST_LAYOUT:
        raise InputError(
            f"slimkv stores its pages in host memory layer by layer: --hicache-mem-layout must be {HOST_LAYOUT}, not "
            f"{options.hicache_mem_layout}"
        )
    _check_speculation(options)


def _check_values(options: Any, table: dict[str, tuple[tuple[Any, ...], str]], what: str = "slimkv") -> None:
    for name, (accepted, reason) in table.items():
        value = getattr(options, name, accepted[0])
        if value not in accepted:
            remedy = "leave it out" if accepted[0] in (False, None) else f"use {flag(name)} {accepted[0]}"
            if accepted[0] is True:
                remedy = f"add {flag(name)}"
            raise UnsupportedError(f"{what} does not work with {flag(name)} ({value!r}): {reason}; {remedy}")


def check_cold_options(server_args: Any) -> None:
    """Raises for server arguments that a cold tier does not support."""
    _check_values(compat.server_options(server_args), _COLD_OPTIONS, "slimkv's cold tier")


def check_cold_model(kvc: Any) -> None:
    """Raises unless the model's cache is one plain pool of K and V."""
    check_parallelism()
    found = {
        "latents": kvc.use_mla_backend,
        "sliding windows in a pool of their own": kvc.is_hybrid_swa,
        "linear-attention layers": compat.full_attention_layers(kvc) is not None,
        "an encoder": kvc.model_config.is_encoder_decoder,
        f"a cache of {kvc.kv_cache_dtype}": kvc.kv_cache_dtype.itemsize == 1,
        "a cache that is sized after graphs are captured": kvc.post_capture_kv_active,
    }
    for what, there in found.items():
        if there:
            raise UnsupportedError(f"slimkv's cold tier does not know {what}: leave out 'cold'")


def check_deterministic(server_args: Any, config: KVCacheConfig) -> None:
    """Raises for options with which deterministic output would depend on the batch."""
    if config.deterministic and compat.server_options(server_args).enable_mixed_chunk:
        raise UnsupportedError(
            "deterministic: SGLang does not say which requests of a mixed batch are in their prompts; leave out "
            "--enable-mixed-chunk"
        )


def _check_speculation(options: Any) -> None:
    algorithm = options.speculative_algorithm
    if algorithm is None:
        return
    algorithm = algorithm.upper()
    if algorithm not in CHAINS:
        raise UnsupportedError(
            f"slimkv verifies chains of drafted tokens, and --speculative-algorithm {algorithm} drafts something else; "
            f"use one of {', '.join(CHAINS)} with --speculative-eagle-topk 1"
        )
    if (options.speculative_eagle_topk or 1) != 1:
        breadth = "--speculative-ngram-max-bfs-breadth" if algorithm in WITHOUT_MODEL else "--speculative-eagle-topk"
        raise UnsupportedError(
            f"slimkv verifies chains of drafted tokens, not trees: {breadth} must be 1, "
            f"not {options.speculative_eagle_topk}"
        )
    if algorithm in WITHOUT_MODEL:
        return
    if options.speculative_draft_attention_backend in (None, BACKEND):
        raise InputError(DRAFT_BACKEND)


def check_parallelism() -> None:
    """Raises if several ranks share the tokens of a sequence."""
    parallel = compat.get_parallel()
    for name, size in (("--dcp-size", parallel.attn_dcp_size), ("--attn-cp-size", parallel.attn_cp_size)):
        if size > 1:
            raise UnsupportedError(f"slimkv does not run under context parallelism ({name} {size}); use --tp-size")


def check_model(kvc: Any, config: KVCacheConfig) -> None:
    """Raises for a model that caches neither K and V nor latents."""
    if kvc.use_mla_backend:
        _check_latents(kvc, config)
    if kvc.kv_cache_dtype.itemsize == 1:  # SGLang takes it from the checkpoint's kv_cache_scheme
        raise UnsupportedError(
            f"the checkpoint declares a cache of {kvc.kv_cache_dtype}, and slimkv packs K and V as the model computes "
            "them, without the checkpoint's k_scale and v_scale: add --kv-cache-dtype bf16"
        )
    if kvc.model_config.is_encoder_decoder:
        raise UnsupportedError("slimkv does not serve encoder-decoder models in SGLang; use another attention backend")
    several_pools = kvc.is_hybrid_swa or compat.full_attention_layers(kvc) is not None
    if several_pools and compat.is_disaggregated(kvc.server_args):
        raise UnsupportedError(
            "slimkv does not send the pages of sliding-window or linear-attention models between SGLang's engines: "
            "leave out --disaggregation-mode"
        )
    if kvc.post_capture_kv_active:
        raise UnsupportedError(
            "slimkv allocates its pages before graphs are captured: unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )


def _check_latents(kvc: Any, config: KVCacheConfig) -> None:
    """Raises for features that slimkv's latent attention does not support."""
    model = kvc.model_config
    asked = {
        "sparse latent attention (DeepSeek V3.2, GLM-5)": compat.is_deepseek_dsa(model.hf_config),
        "latent attention beside linear attention (Kimi-Linear)": compat.full_attention_layers(kvc) is not None,
        "latent attention in sliding windows": kvc.is_hybrid_swa,
        "queries that are scaled by position (llama_4_scaling)": getattr(model.hf_config, "llama_4_scaling", None),
        "latents without a rope part": not model.qk_rope_head_dim,
    }
    for what, found in asked.items():
        if found:
            raise UnsupportedError(f"slimkv does not serve {what} in SGLang; use another attention backend")
    if getattr(compat.server_options(kvc.server_args), "enable_lora", False):
        raise UnsupportedError("slimkv folds a rotation into absorbed projections; --enable-lora would change them")
    config.refuse("latent attention", "calibration")


def forbid_new_weights(model: Any, plan: Any) -> None:
    """Makes SGLang refuse new weights for ``model`` if the cache depends on the weights that it started with."""
    if plan.config.calibration is not None or plan.transfers:
        model._derived_weight_cache_error = f"slimkv: {OTHER_WEIGHTS}"


def check_layers(model: Any, max_head_dim: float = MAX_HEAD_DIM) -> None:
    """Raises for a layer whose attention has a feature that slimkv does not support."""
    for layer in attention_layers(model):
        dims = layer.qk_head_dim, layer.v_head_dim
        features = {
            "cross attention": layer.is_cross_attention,
            f"attention of type {layer.attn_type.value}": layer.attn_type != compat.AttentionType.DECODER,
            "attention in chunks (use_irope)": layer.use_irope,
            f"position encoding inside attention ({layer.pos_encoding_mode})": layer.pos_encoding_mode != "NONE",
            f"a soft cap by {layer.logit_capping_method}": layer.logit_cap and layer.logit_capping_method != "tanh",
            "a temperature by length (xai_temperature_len)": layer.xai_temperature_len > 0,
            f"heads of {dims[0]} and {dims[1]} dimensions (the limit is {max_head_dim})": max(dims) > max_head_dim,
        }
        for feature, found in features.items():
            if found:
                raise UnsupportedError(
                    f"slimkv does not serve layer {layer.layer_id} of this model, which has {feature}; "
                    "use SGLang's own attention backend"
                )


def attention_layers(model: Any) -> Iterator[Any]:
    """The attention layers of a model that use the cache."""
    return (layer for layer in model.modules() if isinstance(layer, compat.RadixAttention))
