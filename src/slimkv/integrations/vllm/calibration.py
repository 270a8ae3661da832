"""The model that vLLM serves, and the calibration matrices of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.positions import matrix_index
from slimkv.config import KVCacheConfig
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.vllm.compat import tensor_parallel_rank
from slimkv.integrations.vllm.settings import parse

_DUMMY = "dummy"  # vLLM's load format of random weights


def served_model(vllm_config: Any, settings: KVCacheConfig | None = None) -> ServedModel:
    """The model of an engine's configuration; ``settings``: by default those of its cache."""
    model = vllm_config.model_config
    return ServedModel(
        settings or parse(vllm_config.additional_config), str(model.model), model.hf_text_config, model.max_model_len,
        tensor_parallel_rank, vllm_config.load_config.load_format == _DUMMY,
    )  # fmt: skip


class MatrixIndex:
    """The matrix index of a step's new tokens, int32, in a buffer with a fixed address for captured graphs."""

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
