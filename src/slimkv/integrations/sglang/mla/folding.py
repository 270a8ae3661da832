"""The projections that SGLang absorbed, with the rotation of the latent folded into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.ops.latent.folding import fold_key_projection, fold_value_projection

_FOLDS = (("w_kc", fold_key_projection), ("w_vc", fold_value_projection))
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class FoldedProjections:
    """The projections of one layer, folded in place, and again whenever SGLang has loaded new ones into them.

    Projections in 8 bits are left as they are: their products are scaled by what was measured of them.
    """

    def __init__(self, attention: Any, rotation: Tensor | None) -> None:
        self._attention, self._rotation = attention, rotation
        self._folded: dict[str, tuple[int, int]] = {}
        weights = [getattr(attention, name) for name, _ in _FOLDS]
        plain = all(isinstance(x, Tensor) and x.dtype in _FLOATS for x in weights) and not attention.use_deep_gemm_bmm
        self.rotated = rotation is not None and plain  # queries come and outputs go in the space latents are stored in
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Folds what was loaded since; does nothing otherwise."""
        if not self.rotated:
            return
        assert self._rotation is not None
        for name, fold in _FOLDS:
            weight = getattr(self._attention, name)
            if self._folded.get(name) == (id(weight), weight._version):
                continue
            if _shares_memory(weight, self._attention.kv_b_proj):  # which prefill reads as it is
                weight = weight.clone()
                setattr(self._attention, name, weight)
            weight.copy_(fold(weight, self._rotation))
            self._folded[name] = (id(weight), weight._version)


def _shares_memory(weight: Tensor, projection: Any) -> bool:
    storages = {x.untyped_storage().data_ptr() for x in projection.parameters()}
    return weight.untyped_storage().data_ptr() in storages
