"""Compiles kernels while vLLM loads weights, and runs each kind of step once while vLLM profiles memory.

vLLM measures memory with one run of the model that has no cache. That run would miss attention workspaces and leave
kernels to compile during the first requests, so each kind of step runs here on a scratch page.
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
    """The block size that kernels will see. vLLM chooses the block size after loading, by the backend's preference, and
    splits blocks that kernels do not support (in hybrid models) into the largest size that they do.
    """
    cache = config.cache_config
    chosen = cache.user_specified_block_size or cache.block_size != cache.DEFAULT_BLOCK_SIZE
    block = cache.block_size if chosen else preferred
    return max((size for size in KERNEL_BLOCKS if block % size == 0), default=PREFERRED_BLOCK)


def verified_tokens(config: Any) -> int:
    """Queries per request in a verification step; 1 without drafts."""
    drafted = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
    return 1 + (drafted or 0)


def compile_ahead(
    key: tuple[Any, ...], kinds: Callable[[torch.device], Iterable[LayerKind]], config: Any
) -> Thread | None:
    """Starts compiling the kernels of ``kinds`` of layers while vLLM loads weights; once per ``key``.

    It runs in its own thread, because tensors that vLLM's thread allocates are in the weights' memory pool, which
    sleep mode discards.
    """
    if not torch.cuda.is_available() or key in _ahead:
        return None
    _ahead.add(key)
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = min(config.scheduler_config.max_num_batched_tokens, _PREFILL)

    def compile_kinds() -> None:
        with torch.cuda.device(device), suppress(SlimKVError):  # the layer itself raises the error later
            found = list(kinds(device))
            for kind in found:
                start_compiling(kind, _steps(tokens, config))
            for kind in found:
                warm_guard(kind)

    thread = Thread(target=compile_kinds, name="slimkv-warmup", daemon=True)
    thread.start()
    return thread


def _steps(tokens: int, config: Any) -> list[Step]:
    """A prefill of ``tokens`` tokens, and every other kind of step."""
    longest = max(config.model_config.max_model_len, tokens)
    return [Step(1, tokens, longest), *serving_steps(longest, verified_tokens(config))]


def profile_run(kind: LayerKind, tokens: int, config: Any) -> None:
    """Runs a prefill of ``tokens`` tokens for each kind of layer and each new maximum. The first time, it also runs the
    other kinds of steps and compiles the guard's kernel.
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
