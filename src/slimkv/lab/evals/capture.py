"""The queries, keys and values a real model attends with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.errors import MissingDependencyError
from slimkv.lab.evals.synthetic import AttentionSample

_NAME = "slimkv_capture"


def capture_attention(model: Any, token_ids: Tensor, queries: int = 64) -> list[AttentionSample]:
    """One sample per layer of a transformers model reading ``token_ids`` (int64 [1, tokens]).

    Keys and values are those of every token, one copy per query head; queries are those of the last ``queries`` tokens.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ModuleNotFoundError as error:
        raise MissingDependencyError("real models need transformers: pip install 'slimkv[transformers]'") from error
    samples: list[AttentionSample] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        all_keys, all_values = (states[0].repeat_interleave(group, 0).float() for states in (key, value))
        samples.append(AttentionSample(query[0, :, -queries:].float(), all_keys, all_values, causal=True))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_NAME, record)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        with torch.no_grad():
            model(token_ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return samples
