"""Runs each kind of step once on a scratch page, while vLLM profiles memory.

vLLM runs the model once without a cache to measure its memory. That run would miss the workspaces of attention, and
kernels would compile during the first requests, so the steps run here.
"""

from __future__ import annotations

from typing import Any

from slimkv.integrations.vllm.page_sizes import KERNEL_BLOCKS, PREFERRED_BLOCK
from slimkv.ops.warmup import LayerKind, Step, run_steps, serving_steps

_largest: dict[tuple[Any, ...], int] = {}


def kernel_block(config: Any) -> int:
    """The block size that kernels will see."""
    block = config.cache_config.block_size
    return block if block in KERNEL_BLOCKS else PREFERRED_BLOCK


def verified_tokens(config: Any) -> int:
    """Queries of a request that verifies drafts; 1 without drafts."""
    drafted = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
    return 1 + (drafted or 0)


def profile_run(kind: LayerKind, tokens: int, config: Any) -> None:
    """Stores and attends ``tokens`` new tokens for each kind of layer and each new maximum; then runs the other kinds
    of steps once per kind of layer.
    """
    if kind.codec.device.type == "cpu":  # nothing to compile, and the cache size is a setting
        return
    before = _largest.get(kind.signature, 0)
    if tokens <= before:
        return
    _largest[kind.signature] = tokens
    longest = max(config.model_config.max_model_len, tokens)
    others = [] if before else serving_steps(longest, verified_tokens(config))
    run_steps(kind, [Step(1, tokens, longest), *others])
