"""What differs between the supported transformers versions (5.17 and later); nothing else looks at versions."""

from __future__ import annotations

import re
from typing import Any

from slimkv.errors import MissingDependencyError

try:
    import transformers
except ImportError as error:
    raise MissingDependencyError(
        'SlimKVCache needs transformers, which is not installed: pip install "slimkv[transformers]"'
    ) from error

OLDEST = (5, 17)


def _version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


if _version() < OLDEST:
    raise MissingDependencyError(
        f"SlimKVCache needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, not {transformers.__version__}: "
        'pip install --upgrade "slimkv[transformers]"'
    )

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "layer_kinds",
    "sdpa_mask",
]


def layer_kinds(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """(layer type, arguments of its stock cache layer) per layer that has a cache, from a model's config."""
    text = config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(text)
    if isinstance(arguments, dict):  # before 5.19 one set of arguments served every layer
        arguments = [arguments] * len(kinds)
    return list(zip(kinds, arguments, strict=False))  # 5.19+ may list arguments for layers that share a cache
