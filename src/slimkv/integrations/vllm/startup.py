"""Checks that run once while an engine starts."""

from __future__ import annotations

from typing import Any

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import logger
from slimkv.integrations.vllm.connectors import check_connectors, check_fingerprints

USEFUL_MATCH = 1024  # tokens; prompts seldom share larger blocks
_checked: dict[tuple[int, int], Any] = {}  # engine configs that this process has checked, by id and block size


def _first_time(vllm_config: Any, block_size: int = 0) -> bool:
    if (id(vllm_config), block_size) in _checked:
        return False
    _checked[id(vllm_config), block_size] = vllm_config
    return True


def check_engine(vllm_config: Any) -> None:
    """Raises for engine settings that packed pages do not support; called by the first layer."""
    if not _first_time(vllm_config):
        return
    if vllm_config.model_config is not None and vllm_config.model_config.is_mm_prefix_lm:
        raise UnsupportedError(
            "the tokens of an image attend to one another in both directions, and slimkv attends causally: serve text "
            "only (--language-model-only, or --limit-mm-per-prompt '{\"image\": 0}'), or use vLLM's own backend"
        )
    check_connectors(vllm_config)


def check_cache(vllm_config: Any, block_size: int) -> None:
    """Runs the checks that need the block size; ``block_size`` is that of the kernels' blocks."""
    if not _first_time(vllm_config, block_size):
        return
    check_fingerprints(vllm_config, block_size)
    if notice := prefix_caching_notice(vllm_config):
        logger.warning("slimkv: %s", notice)


def prefix_caching_notice(vllm_config: Any) -> str | None:
    """A notice if blocks are so large that prompts seldom share one; otherwise None."""
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
