"""SGLang's n-gram drafts as chains.

SGLang drafts a tree of continuations: one branch per match length, padded with children of the root. slimkv verifies in
causal order, so it keeps the longest path of each tree and fills the rest with padding, which is verified like any
other token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slimkv.integrations.sglang.compat import HookRegistry, HookType, check_hooks

_DRAFTS = "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens"


def install() -> None:
    """Turns this process's n-gram drafts into chains."""

    def around(original: Callable[..., Any], worker: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = original(worker, batch)
        return chains(tokens, mask, worker.draft_token_num)

    if _DRAFTS not in HookRegistry._patched:
        HookRegistry.register(_DRAFTS, around, HookType.AROUND)
        HookRegistry.apply_hooks()
    check_hooks((_DRAFTS,))


def chains(tokens: np.ndarray, mask: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Replaces drafted trees with their longest paths.

    Args:
        tokens: int [requests * each]; each request's first one is its last accepted token, the root of the tree.
        mask: [requests * each * each]: whether node j of a request is node i or an ancestor. Ancestors come first.

    Returns tokens and a causal mask of the same shapes and dtypes.
    """
    trees = mask.reshape(-1, each, each).astype(bool)
    paths = np.take_along_axis(trees, trees.sum(-1).argmax(-1)[:, None, None], 1)[:, 0]  # [requests, each]
    order = np.argsort(~paths, 1, kind="stable")  # first the nodes on the path, in order
    length = paths.sum(-1, keepdims=True)
    found = np.take_along_axis(tokens.reshape(-1, each), order, 1)
    found = np.where(np.arange(each) < length, found, 0).astype(tokens.dtype)
    causal = np.broadcast_to(np.tri(each, dtype=mask.dtype), trees.shape)
    return found.reshape(tokens.shape), np.ascontiguousarray(causal).reshape(mask.shape)
