"""Runs each kind of step once on a scratch page, while vLLM profiles memory.

vLLM runs the model once without a cache to measure its memory. That run would miss the workspaces of attention, and
kernels would compile during the first requests, so the steps run here.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import torch

from slimkv.integrations.vllm.page_sizes import KERNEL_BLOCKS, PREFERRED_BLOCK
from slimkv.ops.warmup import LayerKind, Step, run_steps, serving_steps, start_compiling

_largest: dict[tuple[Any, ...], int] = {}
_ahead: set[tuple[Any, ...]] = set()


def kernel_block(config: Any) -> int:
    """The block size that kernels will see."""
    block = config.cache_config.block_size
    return block if block in KERNEL_BLOCKS else PREFERRED_BLOCK


def verified_tokens(config: Any) -> int:
    """Queries of a request that verifies drafts; 1 without drafts."""
    drafted = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
    return 1 + (drafted or 0)


def compile_ahead(key: tuple[Any, ...], kind: Callable[[torch.device], LayerKind], config: Any) -> None:
    """Starts to compile the kernels of a kind of layer, known by ``key``, while vLLM compiles the model.

    A thread makes ``kind``: vLLM's own is in the memory pool of weights, which sleep mode discards.
    """
    if not torch.cuda.is_available() or key in _ahead:
        return
    _ahead.add(key)
    device, tokens = torch.device("cuda", torch.cuda.current_device()), config.scheduler_config.max_num_batched_tokens

    def compile_steps() -> None:
        with torch.cuda.device(device):
            start_compiling(kind(device), _steps(tokens, config))

    Thread(target=compile_steps, name="slimkv-warmup", daemon=True).start()


def _steps(tokens: int, config: Any) -> list[Step]:
    """A prefill of ``tokens`` tokens, and the other kinds of steps."""
    longest = max(config.model_config.max_model_len, tokens)
    return [Step(1, tokens, longest), *serving_steps(longest, verified_tokens(config))]


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
    steps = _steps(tokens, config)
    run_steps(kind, steps[:1] if before else steps)
