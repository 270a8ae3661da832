"""Merges attention over two sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.errors import InputError
from slimkv.ops.checks import check_pair


@typed
def merge_attention_states(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merges (output [..., dim], log-sum-exp [...]) of two key sets to float32 [..., dim]; ``other`` may be empty."""
    for name, given in (("one", one), ("other", other)):
        check_pair(name, given, "an output and its log-sum-exp")
        if given[0].shape[:-1] != given[1].shape or given[0].shape != one[0].shape:
            raise InputError(
                f"{name} has an output {list(given[0].shape)} and a log-sum-exp {list(given[1].shape)}; outputs "
                "need the same shape, with one axis more than log-sum-exps"
            )
    return merged(one, other)[0]


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``merge_attention_states`` with the log-sum-exp of all keys, unchecked."""
    share = torch.sigmoid(other[1] - one[1])[..., None]  # the weight of ``other`` in the softmax
    return other[0].float() * share + one[0].float() * (1 - share), torch.logaddexp(one[1], other[1])
