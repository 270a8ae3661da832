"""The query-aware matrices for the tokens of a forward pass, chosen by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.positions import matrix_index


class MatrixIndex:
    """The index of a forward pass, computed once for all layers."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._edges = calibration.position_edges()
        self._last: tuple[tuple[Any, ...], Tensor] | None = None
        self._noted: tuple[int, Tensor] | None = None

    def note(self, first: int, position_ids: Tensor | None) -> None:
        """Records the model's position ids int [batch or 1, new] for the pass after ``first`` tokens; None clears
        them. These are the positions that rotary embedding uses, with or without padding.
        """
        known = position_ids is not None and position_ids.ndim == 2
        self._noted = (first, position_ids) if known and position_ids is not None else None
        self._last = None

    def __call__(self, first: int, new: int, pads: list[int], device: torch.device) -> Tensor:
        """The index of ``new`` tokens per sequence after ``first`` tokens (``pads`` of padding): int32 [batch * new].

        Positions that were not noted are counted from the end of the known padding, as ``generate`` does. In the first
        pass no padding is known yet, because attention reports it.
        """
        self._calibration.warn_beyond(first + new - min(pads))
        key = first, new, tuple(pads), device
        if self._last is None or self._last[0] != key:
            positions = self._noted_positions(first, new, len(pads))
            if positions is None:
                counted = torch.arange(first, first + new, device=device).expand(len(pads), new)
                if any(pads):
                    counted = (counted - torch.tensor(pads, device=device)[:, None]).clamp(min=0)
                positions = counted.reshape(-1)
            self._last = key, matrix_index(positions.to(device), self._edges)
        return self._last[1]

    def _noted_positions(self, first: int, new: int, batch: int) -> Tensor | None:
        """int [batch * new] from the noted positions; None if they do not cover these tokens."""
        if self._noted is None:
            return None
        start, ids = self._noted
        if not start <= first <= first + new <= start + ids.shape[1] or ids.shape[0] not in (1, batch):
            return None
        return ids[:, first - start : first - start + new].expand(batch, new).reshape(-1)


def note_positions(model: Any) -> Any:
    """Passes the position ids of every pass of ``model`` to its calibrated cache; returns a handle with ``remove``."""
    return model.register_forward_pre_hook(_note, with_kwargs=True)


def _note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache, ids = kwargs.get("past_key_values"), kwargs.get("position_ids")
    index = getattr(cache, "matrix_index", None)
    if isinstance(index, MatrixIndex):
        new = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        first = cache.get_seq_length()  # type: ignore[union-attr]
        if ids is None and isinstance(new, Tensor):  # models count from the cached length on
            ids = torch.arange(first, first + new.shape[1], device=new.device)[None]
        index.note(first, ids)
