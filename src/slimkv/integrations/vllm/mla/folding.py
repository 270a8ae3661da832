"""The projections that vLLM absorbed, with the rotation of the latent folded into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.ops.latent.folding import fold_key_projection, fold_value_projection


class FoldedProjections:
    """The folded projections of one layer; folded again whenever the layer has made new ones."""

    FOLDS = (("W_UK_T", fold_key_projection), ("W_UV", fold_value_projection))

    def __init__(self) -> None:
        self._own: dict[str, torch.nn.Parameter] = {}

    @torch.no_grad()
    def fold(self, layer: Any, rotation: Tensor) -> None:
        """Folds ``rotation`` into the layer's projections.

        At first they are views of a weight that prefill reads as it is, so the layer gets parameters of its own. When
        weights are loaded again vLLM fills those in place, and they stay where they are, as captured graphs need.
        """
        for name, fold in self.FOLDS:
            weight = getattr(layer, name, None)
            if not isinstance(weight, torch.nn.Parameter):
                raise UnsupportedError(
                    f"vLLM has absorbed the projections of {layer.layer_name} into other weights than {name}, so that "
                    "slimkv cannot fold its rotation into them; use a format that is stored unrotated, such as 'craw' "
                    "or 'cu4'"
                )
            folded = fold(weight, rotation)
            if self._own.get(name) is weight:
                weight.copy_(folded)
                continue
            self._own[name] = torch.nn.Parameter(folded.contiguous(), requires_grad=False)
            setattr(layer, name, self._own[name])
