"""A calibration in vLLM: which one is meant, each rank's query-aware matrices, and which of them a token takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.positions import matrix_index
from slimkv.calibration.serving import rank_matrices, served_calibration
from slimkv.codec import Codec
from slimkv.config import KVCacheConfig
from slimkv.integrations.vllm.compat import tensor_parallel_rank


def load_calibration(settings: KVCacheConfig, model_config: Any) -> Calibration | None:
    """The calibration of the settings, checked to be made for this model; a longer context is warned of once."""
    return served_calibration(
        settings.calibration, str(model_config.model), model_config.hf_text_config, model_config.max_model_len
    )


def query_aware_matrices(
    calibration: Calibration, model_config: Any, layer: int, codec: Codec, num_kv_heads: int
) -> Tensor | None:
    """``Calibration.query_aware_matrices`` for the KV heads of a layer that this rank holds."""
    return rank_matrices(calibration, layer, codec, num_kv_heads, *tensor_parallel_rank(), model_config.max_model_len)


class MatrixIndex:
    """Which matrix the new tokens of a step take: int32, in a buffer that stays where it is, as captured graphs ask."""

    def __init__(self, edges: tuple[int, ...], max_tokens: int, device: torch.device) -> None:
        self._edges = edges
        self._rows = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.buffer = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def fill(self, cu_seqlens_q: Tensor, seq_lens: Tensor, tokens: int) -> Tensor:
        """cu_seqlens_q int32 [requests + 1] and seq_lens int32 [requests] -> the buffer, filled up to ``tokens``."""
        rows = self._rows[:tokens]
        ends = cu_seqlens_q[1:].contiguous()
        request = torch.searchsorted(ends, rows, right=True).clamp(max=len(seq_lens) - 1)
        positions = seq_lens[request] - ends[request] + rows
        self.buffer[:tokens] = matrix_index(positions, self._edges)
        return self.buffer
