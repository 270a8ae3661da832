"""The index of each token's query-aware matrix; there is one matrix per range of positions.

Rotary embedding rotates queries by their position. Planes of low frequency rotate slowly, so one matrix for all
positions would be wrong there; planes of high frequency average out. Ranges may therefore grow with the position.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from slimkv.errors import InputError

# Measured on SmolLM2 up to 8,192 (`slimkv eval positions`): twice as many ranges gain 2% there, half as many lose 5%.
_FIRST = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


def position_edges(max_positions: int) -> tuple[int, ...]:
    """The ends of ranges, up to the first one at or beyond ``max_positions``; two per octave beyond 8,192."""
    if max_positions < 1:
        raise InputError(f"max_positions must be 1 or more, not {max_positions}")
    edges = list(_FIRST)
    while edges[-1] < max_positions:
        edges += [edges[-1] * 3 // 2, edges[-1] * 2]
    return tuple(edges[: next(i for i, edge in enumerate(edges) if edge >= max_positions) + 1])


def matrix_index(positions: Tensor, edges: tuple[int, ...]) -> Tensor:
    """positions int [tokens] -> the index of their ranges, int32 [tokens]; beyond all ranges, the last one."""
    return torch.bucketize(positions.long(), _boundaries(edges, positions.device), right=True, out_int32=True)


@lru_cache(maxsize=64)
def _boundaries(edges: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges[:-1], dtype=torch.int64, device=device)
