"""Folds the latent's rotation into SGLang's absorbed projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.ops.latent.folding import fold_key_projection, fold_value_projection

_FOLDS = (("w_kc", fold_key_projection), ("w_vc", fold_value_projection))
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class FoldedProjections:
    """The absorbed projections of one layer, folded in place each time SGLang has loaded new ones.

    8-bit projections stay unfolded, because their scales were measured on the original weights.
    """

    def __init__(self, attention: Any, rotation: Tensor | None) -> None:
        self._attention, self._rotation = attention, rotation
        self._folded: dict[str, tuple[int, int]] = {}
        weights = [getattr(attention, name) for name, _ in _FOLDS]
        plain = all(isinstance(x, Tensor) and x.dtype in _FLOATS for x in weights) and not attention.use_deep_gemm_bmm
        self.rotated = rotation is not None and plain  # so queries and outputs are rotated, as stored latents are
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Folds projections that were loaded since the last call."""
        if not self.rotated:
            return
        assert self._rotation is not None
        for name, fold in _FOLDS:
            weight = getattr(self._attention, name)
            if self._folded.get(name) == (id(weight), weight._version):
                continue
            unfolded = {x.untyped_storage().data_ptr() for x in self._attention.kv_b_proj.parameters()}  # for prefill
            if weight.untyped_storage().data_ptr() in unfolded:
                weight = weight.clone()
                setattr(self._attention, name, weight)
            weight.copy_(fold(weight, self._rotation))
            self._folded[name] = (id(weight), weight._version)
