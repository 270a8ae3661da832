"""The mask that goes with the attention: transformers' own for ``sdpa``, with a note of what it means.

The fused attention takes causal order, a window and left padding as such. The note travels on the mask tensor; code
that makes another mask of it loses the note, and attention then runs on decoded keys and values under that mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.integrations.transformers.compat import sdpa_mask

_NOTE = "_slimkv_note"


@dataclass(frozen=True)
class MaskNote:
    """The mask is the layer's causal pattern and hides ``pads[b]`` leading positions of sequence b."""

    pads: list[int]


def slimkv_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The boolean mask [batch, 1, queries, keys] of ``sdpa_mask`` with its note; None where causal order is all."""
    mask = sdpa_mask(*args, **kwargs)
    if mask is None or args:
        return mask
    plain = (
        kwargs.get("allow_is_causal_skip", True)  # false when somebody adds to the pattern
        and not kwargs.get("allow_is_bidirectional_skip", False)
        and not kwargs.get("use_vmap", False)
    )
    if plain:
        pads = left_padding(kwargs.get("attention_mask"), mask.shape[0])
        if pads is not None:
            setattr(mask, _NOTE, MaskNote(pads))
    return mask


def note_of(mask: Tensor | None) -> MaskNote | None:
    """What is known about a mask; None for a mask that somebody else made."""
    return getattr(mask, _NOTE, None)


def left_padding(attention_mask: Tensor | None, batch: int) -> list[int] | None:
    """Leading hidden positions per sequence of a mask [batch, positions]; None if anything else is hidden."""
    if attention_mask is None:
        return [0] * batch
    shown = attention_mask.bool()
    leading = (shown.cumsum(-1) == 0).sum(-1)
    both = torch.stack([leading, shown.shape[-1] - shown.sum(-1)]).tolist()
    return both[0] if both[0] == both[1] else None
