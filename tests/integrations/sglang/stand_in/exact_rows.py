"""A plugin that makes SGLang's GEMMs on a CPU batch-invariant. SGLang's own batch-invariant kernels need a GPU.

It replaces the kernels that ``--enable-deterministic-inference`` installs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "shared"))


def register() -> None:
    import torch
    from row_exact import exact_linear, row_by_row
    from sglang.srt.model_executor.model_runner import ModelRunner

    matmul = torch.matmul

    def exact_matmul(x: torch.Tensor, y: torch.Tensor, **more: object) -> torch.Tensor:
        plain = x.ndim == 2 and y.ndim == 2 and not more
        return row_by_row(lambda row: matmul(row, y), x) if plain else matmul(x, y, **more)

    exact_linear(setattr)
    torch.matmul = exact_matmul
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None


class Corpus:
    """Drafts trees in place of SGLang's corpus, which is compiled for GPUs: a wrong branch, a likely one, padding."""

    def __init__(self, draft_token_num: int, **others: Any) -> None:
        self.each = draft_token_num
        self.seen: list[list[int]] = []

    def batch_get(self, ids: Any, tails: list[list[int]], lengths: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [requests * each] and masks [requests * each * each] of trees. Their roots are the last tokens."""
        tokens, masks = [], []
        for tail in tails:
            draft = self._draft(tail)
            nodes = [tail[-1], tail[-1], *draft]
            parents = [-1, 0, 0, *range(2, 1 + len(draft))]
            nodes += [0] * (self.each - len(nodes))
            parents += [0] * (self.each - len(parents))
            mask = np.eye(self.each, dtype=np.uint8)
            for node, parent in enumerate(parents[: self.each]):
                if parent >= 0:
                    mask[node] |= mask[parent]
            tokens += nodes[: self.each]
            masks.append(mask.reshape(-1))
        return np.array(tokens, dtype=np.int64), np.concatenate(masks)

    def _draft(self, tail: list[int]) -> list[int]:
        """The tokens that followed an earlier occurrence of the last two tokens, or [0]."""
        for known in (tail[:-1], *reversed(self.seen)):
            for at in range(len(known) - 2, 0, -1):
                if known[at - 1 : at + 1] == tail[-2:]:
                    return known[at + 1 : at + self.each - 1]
        return [0]

    def batch_put(self, tails: list[list[int]]) -> None:
        self.seen += tails

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def erase_match_state(self, ids: Any) -> None:
        """No state is kept per request."""

    def reset(self) -> None:
        self.seen = []


def with_drafts() -> None:
    """Registers the plugin together with drafts by ``torch_native`` and n-gram drafts."""
    from sglang.srt.speculative import ngram_worker
    from torch_native_drafts import register as register_drafts

    ngram_worker.NgramCorpus = Corpus
    register_drafts()
    register()
