"""Which query-aware matrices the tokens of a forward pass take, by their positions."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.positions import matrix_index


class MatrixIndex:
    """The index of a pass, made once for all layers that ask for it."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._edges = calibration.position_edges()
        self._last: tuple[tuple[Any, ...], Tensor] | None = None

    def __call__(self, first: int, new: int, pads: list[int], device: torch.device) -> Tensor:
        """Of ``new`` tokens per sequence from position ``first`` on, after ``pads`` of padding: int32 [batch * new].

        Padding is known only when attention runs: the first layer's first tokens are taken for later by that much.
        """
        self._calibration.warn_beyond(first + new - min(pads))
        ends = {self._number(position - pad) for pad in set(pads) for position in (first, first + new - 1)}
        same = len(ends) == 1
        key = (min(ends), len(pads), new, device) if same else (first, tuple(pads), new, device)
        if self._last is None or self._last[0] != key:
            self._last = key, self._same(key) if same else self._made(first, new, pads, device)
        return self._last[1]

    def _number(self, position: int) -> int:
        return min(bisect_right(self._edges, max(position, 0)), len(self._edges) - 1)

    def _same(self, key: tuple[Any, ...]) -> Tensor:
        number, batch, new, device = key
        return torch.full((batch * new,), number, dtype=torch.int32, device=device)

    def _made(self, first: int, new: int, pads: list[int], device: torch.device) -> Tensor:
        positions = torch.arange(first, first + new, device=device)
        own = (positions[None, :] - torch.tensor(pads, device=device)[:, None]).clamp(min=0)
        return matrix_index(own.reshape(-1), self._edges)
