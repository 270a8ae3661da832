"""Attention over two sets of keys from the attention over each of them."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention_states(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """float32 [..., dim] from (output [..., dim], log-sum-exp [...]) of each; ``other`` may have seen no key."""
    share = torch.sigmoid(other[1] - one[1])[..., None]  # the other's weight in the softmax
    return other[0].float() * share + one[0].float() * (1 - share)
