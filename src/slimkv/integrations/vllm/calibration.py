"""A calibration in vLLM: the widths it chose, each rank's query-aware matrices, and which of them a token takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.cache import cached_calibration
from slimkv.calibration.positions import matrix_index
from slimkv.codec import Codec
from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.vllm.compat import tensor_parallel_rank


@lru_cache(maxsize=8)
def _load(path: str, model: str) -> Calibration:
    """One file serves all layers of a process."""
    return cached_calibration(model) if path == AUTO else Calibration.load(path)


def load_calibration(settings: KVCacheConfig, model_config: Any) -> Calibration | None:
    """The calibration of the settings, checked to be made for this model; a longer context is warned of once."""
    given = settings.calibration
    if given is None:
        return None
    found = given if isinstance(given, Calibration) else _load(str(given), str(model_config.model))
    found.check_model(model_config.hf_text_config)
    found.warn_beyond(model_config.max_model_len)
    return found


def chosen_format(calibration: Calibration, layer: int) -> str:
    """The format that the calibration chose for a layer."""
    formats = calibration.formats
    if formats is None or layer not in formats:
        raise InputError(
            f"slimkv: format 'calibrated' takes the widths from {calibration.name}, which chose none for layer "
            f"{layer}: run slimkv calibrate with --budget or --profile"
        )
    return formats[layer]


def rank_heads(total: int, held: int, rank: int, ranks: int) -> slice:
    """Which of a layer's ``total`` KV heads a rank holds: its share, or one that several ranks hold alike."""
    first = rank * held if total >= ranks else rank * total // ranks
    return slice(first, first + held)


def query_aware_matrices(
    calibration: Calibration, model_config: Any, layer: int, codec: Codec, num_kv_heads: int
) -> Tensor | None:
    """``Calibration.query_aware_matrices`` for the KV heads of a layer that this rank holds."""
    rank, ranks = tensor_parallel_rank()
    total = calibration.statistics(layer).num_kv_heads
    heads = rank_heads(total, num_kv_heads, rank, ranks)
    return calibration.query_aware_matrices(layer, codec, heads, model_config.max_model_len)


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
