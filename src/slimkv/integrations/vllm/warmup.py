"""Compiles kernels while vLLM loads weights, and runs each kind of step once while vLLM profiles memory.

vLLM runs the model once without a cache to measure its memory. That run would miss the workspaces of attention, and
kernels would compile during the first requests, so the steps run here, on a scratch page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from slimkv.errors import SlimKVError
from slimkv.integrations.serving.layer import warm_guard
from slimkv.integrations.vllm.page_sizes import KERNEL_BLOCKS, PREFERRED_BLOCK
from slimkv.ops.warmup import LayerKind, Step, run_steps, serving_steps, start_compiling

_PREFILL = 1024  # tokens; longer passes run the same kernels
_largest: dict[tuple[Any, ...], int] = {}
_ahead: set[tuple[Any, ...]] = set()


def kernel_block(config: Any, preferred: int = PREFERRED_BLOCK) -> int:
    """The block size that kernels will see. vLLM chooses one after loading, by the backend's preference, and divides a
    block that kernels do not support (a hybrid model's) into the largest ones that they do.
    """
    cache = config.cache_config
    chosen = cache.user_specified_block_size or cache.block_size != cache.DEFAULT_BLOCK_SIZE
    block = cache.block_size if chosen else preferred
    return max((size for size in KERNEL_BLOCKS if block % size == 0), default=PREFERRED_BLOCK)


def verified_tokens(config: Any) -> int:
    """Queries of a request that verifies drafts; 1 without drafts."""
    drafted = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
    return 1 + (drafted or 0)


def compile_ahead(
    key: tuple[Any, ...], kinds: Callable[[torch.device], Iterable[LayerKind]], config: Any
) -> Thread | None:
    """Starts to compile the kernels of the ``kinds`` of layers known by ``key``, while vLLM loads weights.

    A thread makes them: tensors of vLLM's own are in the memory pool of weights, which sleep mode discards.
    """
    if not torch.cuda.is_available() or key in _ahead:
        return None
    _ahead.add(key)
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = min(config.scheduler_config.max_num_batched_tokens, _PREFILL)

    def compile_kinds() -> None:
        with torch.cuda.device(device), suppress(SlimKVError):  # which the layer itself will raise
            found = list(kinds(device))
            for kind in found:
                start_compiling(kind, _steps(tokens, config))
            for kind in found:
                warm_guard(kind)

    thread = Thread(target=compile_kinds, name="slimkv-warmup", daemon=True)
    thread.start()
    return thread


def _steps(tokens: int, config: Any) -> list[Step]:
    """A prefill of ``tokens`` tokens, and the other kinds of steps."""
    longest = max(config.model_config.max_model_len, tokens)
    return [Step(1, tokens, longest), *serving_steps(longest, verified_tokens(config))]


def profile_run(kind: LayerKind, tokens: int, config: Any) -> None:
    """Stores and attends ``tokens`` new tokens for each kind of layer and each new maximum; then runs the other kinds
    of steps, and the guard's, once per kind of layer.
    """
    if kind.codec.device.type == "cpu":  # nothing to compile, and the cache size is a setting
        return
    before = _largest.get(kind.signature, 0)
    if tokens <= before:
        return
    _largest[kind.signature] = tokens
    steps = _steps(tokens, config)
    run_steps(kind, steps[:1] if before else steps)
    if not before:
        warm_guard(kind)
