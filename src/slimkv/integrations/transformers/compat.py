"""Differences between the supported transformers versions (5.17 and later); no other module checks versions."""

from __future__ import annotations

import inspect
from typing import Any

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.versions import check_installed
from slimkv.versions import version_numbers

VERSION = version_numbers(check_installed("transformers", "transformers", oldest=(5, 17)), 2)

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils.generic import TransformersKwargs  # noqa: E402
from transformers.utils.output_capturing import _active_collector as collector  # noqa: E402

# Arguments of a model's forward that also reach its attention without changing it. The arguments of packed (unpadded)
# sequences do change it, and only flash attention supports them.
FORWARD_ARGUMENTS = frozenset(TransformersKwargs.__annotations__) - {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal", "seq_idx",
}  # fmt: skip


_OTHER_MEMORIES = ("cache_params", "state", "mems", "cache", "past_buckets_states", "shared_kv_states")


def layer_kinds(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """(layer type, arguments of its stock cache layer) per layer that has a cache, from a model's config.

    Layers that attend to another sequence (an image, in mllama) are ``cross_attention``.
    """
    text = config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(text)
    if isinstance(arguments, dict):  # before 5.19 all layers shared one set of arguments
        arguments = [arguments] * len(kinds)
    cross = set(getattr(text, "cross_attention_layers", None) or ())
    kinds = ["cross_attention" if number in cross else kind for number, kind in enumerate(kinds)]
    return list(zip(kinds, arguments[: len(kinds)], strict=True))  # 5.19+ may also list layers that share a cache


def stock_layer(kind: str, arguments: dict[str, Any]) -> Any:
    """The layer that ``DynamicCache`` creates for ``kind``."""
    return DynamicLayer() if kind == "cross_attention" else DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)


def caches_latents(config: Any) -> bool:
    """Whether a model caches one latent and one rope part per token instead of K and V of its heads.

    Models with ``kv_lora_rank`` pass them to their cache instead of K and V; those with an indexer only since 5.19.
    """
    text = config.get_text_config(decoder=True)
    indexed = getattr(text, "index_topk", None) is not None
    return getattr(text, "kv_lora_rank", None) is not None and (not indexed or VERSION >= (5, 19))


def refuse_without_cache(config: Any, model: Any) -> None:
    """Raises for models that do not take a cache of keys and values."""
    kind = type(model) if model is not None else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or isinstance(kind, tuple) or not hasattr(kind, "forward"):
        return
    takes = inspect.signature(kind.forward).parameters
    supports = getattr(kind, "_supports_default_dynamic_cache", lambda: True)
    other = next((x for x in _OTHER_MEMORIES if x in takes), None)
    # Composite models may pass a cache on to their text model; a causal LM has no such part.
    alone = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and "use_cache" not in takes
    if "past_key_values" not in takes and (other or alone):
        instead = f"; its state between steps is called {other}" if other else ""
        raise UnsupportedError(
            f"{kind.__name__} does not take a cache of keys and values, so there is nothing to pack{instead}"
        )
    if not supports():
        raise UnsupportedError(
            f"{kind.__name__} accepts only the cache class of its own modeling file, which slimkv does not pack: use "
            "it with its own cache"
        )
