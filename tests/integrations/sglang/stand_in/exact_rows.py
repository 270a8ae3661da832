"""A plugin for SGLang with which products on a CPU do not depend on the batch; SGLang's own are for GPUs.

It takes the place of what ``--enable-deterministic-inference`` installs there.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def with_drafts() -> None:
    """Also drafts by ``torch_native``."""
    from torch_native_drafts import register as register_drafts

    register_drafts()
    register()
