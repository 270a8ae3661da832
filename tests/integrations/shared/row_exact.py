"""Products row by row, so that what is left to depend on a batch is attention.

On a CPU, products of matrices of other shapes round otherwise, in any engine. The engines' switches for batch-invariant
serving make their own products invariant on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of every row [..., dim] by itself, as if it came alone."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= 1:
        return function(x)
    return torch.cat([function(rows[i : i + 1]) for i in range(rows.shape[0])]).reshape(*x.shape[:-1], -1)


def exact_linear(patch: Callable[[object, str, object], None]) -> None:
    """``patch(owner, name, value)`` replaces torch's linear layers by ones whose rows do not depend on one another."""
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return row_by_row(lambda row: plain(row, weight, bias), x)

    patch(torch.nn.functional, "linear", linear)
