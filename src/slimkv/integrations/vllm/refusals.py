"""Start-up checks: they raise for features of a model or an engine that slimkv does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimkv.calibration.identity import weights_digest
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.model import OTHER_WEIGHTS, ServedModel
from slimkv.integrations.vllm import connectors
from slimkv.integrations.vllm.compat import REVIEWED, before_new_weights, layer_number, layout_is_chosen, logger
from slimkv.integrations.vllm.page_sizes import CACHE_DTYPES
from slimkv.integrations.vllm.settings import parse

USEFUL_MATCH = 1024  # tokens; prompts rarely share larger blocks
OWN_BACKEND = "serve this model with vLLM's own attention backend"
LATENTS = "slimkv's latent attention"
SPARSE = (
    "slimkv packs dense latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash) and the sparse one of models "
    f"whose configuration has index_topk (DeepSeek V3.2, GLM-5), not that of this model; {OWN_BACKEND}"
)
DRAFTERS = REVIEWED["speculative_methods"]  # all but extract_hidden_states, which keeps hidden states in the cache
# The fields of vLLM's SpeculativeConfig that leave slimkv host-side bounds on the queries of every request. Without
# such bounds, as with enable_adaptive_verification, which drops drafts on the device, attention would omit queries.
DRAFTING = frozenset(REVIEWED["speculative_options"])
SHARING_DRAFTERS = ("gemma4_mtp",)  # by the model type of their configuration
LATENT_ARGUMENTS = frozenset(REVIEWED["latent_arguments"])  # of an implementation of latent attention
COPIES = "slimkv has its own copies of the projections of latent attention, which"
REWRITTEN_BY = ("nccl", "ipc")  # backends of weight transfer after which vLLM processes the weights of attention again
_first_weights: dict[int, tuple[Any, str | None]] = {}  # engine configs and digests of their weights, by id
_seen: dict[tuple[object, ...], Any] = {}  # engine configs of which ``first_time`` was asked, kept alive


def first_time(vllm_config: Any, *what: object) -> bool:
    """Whether this process asks ``what`` of an engine's config for the first time."""
    if (id(vllm_config), *what) in _seen:
        return False
    _seen[id(vllm_config), *what] = vllm_config
    return True


def check_engine(vllm_config: Any) -> None:
    """Raises for engine settings that packed pages do not support. The first layer calls it."""
    if not first_time(vllm_config):
        return
    if vllm_config.model_config is not None and vllm_config.model_config.is_mm_prefix_lm:
        raise UnsupportedError(
            "the tokens of an image attend to one another in both directions, and slimkv attends causally: serve text "
            "only (--language-model-only, or --limit-mm-per-prompt '{\"image\": 0}'), or use vLLM's own backend"
        )
    connectors.check_connectors(vllm_config)
    check_drafter(getattr(vllm_config, "speculative_config", None))
    watch_weights(vllm_config, parse(vllm_config.additional_config))


def watch_weights(vllm_config: Any, settings: KVCacheConfig) -> None:
    """Keeps the digest of the weights if a calibration or a fingerprint belongs to them, for ``check_new_weights``."""
    if settings.calibration is not None or connectors.pages_leave_the_engine(vllm_config):
        _first_weights[id(vllm_config)] = vllm_config, weights_digest(getattr(vllm_config.model_config, "model", None))


def check_new_weights(
    vllm_config: Any, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
) -> None:
    """Raises if a running engine cannot follow new weights. The arguments are those of vLLM's ``reload_weights``."""
    if id(vllm_config) in _first_weights:  # a digest reads parts of every file
        new = weights_digest(weights_path or vllm_config.model_config.model) if weights_iterator is None else None
        if new is None or new != _first_weights[id(vllm_config)][1]:
            raise UnsupportedError(OTHER_WEIGHTS)
    layers = vllm_config.compilation_config.static_forward_context.values()
    if not is_checkpoint_format and any(hasattr(getattr(x, "impl", None), "absorbed_weights_ready") for x in layers):
        raise UnsupportedError(f"{COPIES} is_checkpoint_format=False does not change: leave it out")


before_new_weights(check_new_weights)


def check_drafter(speculative: Any) -> None:
    """Raises for an unknown speculative method, and for drafters that read the target's cache."""
    if speculative is None:
        return
    if speculative.method not in DRAFTERS:
        raise UnsupportedError(
            f"slimkv does not know the speculative method {speculative.method!r}; use one of {', '.join(DRAFTERS)}"
        )
    others = {name: getattr(speculative, name) for name in vars(speculative) if name not in DRAFTING}
    refuse("slimkv's verification of drafts", others, "leave it out of the speculative config")
    drafter = getattr(getattr(speculative.draft_model_config, "hf_config", None), "model_type", None)
    if drafter in SHARING_DRAFTERS:
        raise UnsupportedError(
            f"the drafter {drafter} reads the cache of the model it drafts for, which holds packed pages: "
            "use another drafter"
        )


def check_one_format(model: ServedModel, name: str, stored: str) -> None:
    """Raises if the settings give layer ``name`` another format than layer ``stored``, whose cache it reads."""
    reader, owner = layer_number(name), layer_number(stored)
    own, owners = (model.settings.format_of(number, model.config.num_hidden_layers) for number in (reader, owner))
    if own != owners:
        raise InputError(
            f"layer {reader} reads the cache of layer {owner}, so both have one format, but the settings say {own!r} "
            f"for layer {reader} and {owners!r} for layer {owner}: name both in layers, or neither"
        )


def check_cache(vllm_config: Any, block_size: int) -> None:
    """Runs the checks that need the kernels' ``block_size``."""
    if not first_time(vllm_config, block_size):
        return
    connectors.check_fingerprints(vllm_config, block_size)
    if notice := prefix_caching_notice(vllm_config):
        logger.warning("slimkv: %s", notice)


def prefix_caching_notice(vllm_config: Any) -> str | None:
    """A notice if blocks are so large that prompts rarely share one; otherwise None."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not cache.enable_prefix_caching or getattr(cache, "prefix_match_unit", None) is not None:
        return None
    block, longest = cache.block_size, model.max_model_len
    if block <= USEFUL_MATCH and block < longest:
        return None
    effect = "prompts that share fewer tokens share nothing in the prefix cache"
    if block >= longest:
        effect = f"no prompt of up to {longest} tokens fills one, so prefix caching never hits"
    return (
        f"a block has {block} tokens, because a packed token is small beside the model's recurrent state, and "
        f"{effect}. --prefix-match-unit 64 makes hits possible inside a block"
    )


def refuse(who: str, features: Mapping[str, Any], remedy: str = OWN_BACKEND) -> None:
    """Raises if any of ``features`` is set (neither None nor False)."""
    asked = [name for name, value in features.items() if value is not None and value is not False]
    if asked:
        raise UnsupportedError(f"{who} does not support {', '.join(asked)}; {remedy}")


def check_cache_dtype(kv_cache_dtype: str) -> None:
    """Raises for a quantised cache dtype of vLLM."""
    if kv_cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"slimkv stores its own formats, so kv_cache_dtype must be left at auto, not {kv_cache_dtype!r}; if the "
            "checkpoint declares it, add --kv-cache-dtype bfloat16"
        )


def check_latents(
    vllm_config: Any, kv_cache_dtype: str, features: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Raises for features that slimkv's latent attention lacks. ``arguments``: those specific to latent attention."""
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
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is not None and transfer.backend not in REWRITTEN_BY:
        raise UnsupportedError(
            f"{COPIES} weight transfer by {transfer.backend!r} may not change: use {' or '.join(REWRITTEN_BY)}"
        )
    if layout_is_chosen() and any(x == connectors.EXAMPLE_CONNECTOR for x, _ in connectors.connectors(vllm_config)):
        raise UnsupportedError(
            f"{connectors.EXAMPLE_CONNECTOR} writes latents into a copy of the cache in some layouts: unset "
            "VLLM_KV_CACHE_LAYOUT"
        )
    parse(vllm_config.additional_config).refuse("latent attention", "calibration")
