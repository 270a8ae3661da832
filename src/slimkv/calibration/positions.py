"""Which query-aware matrix a token's key takes: one per range of positions.

Queries are turned by their position, so what they look at changes with it: slowly in the planes of low frequency, which
is where a matrix for all positions would be wrong, and so fast in the others that they average out. Ranges may
therefore grow with the position.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from slimkv.errors import InputError

# Measured on SmolLM2 up to 8,192 (`slimkv eval positions`): twice as many ranges gain 2% there, half as many lose 5%.
_FIRST = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


def position_edges(max_positions: int) -> tuple[int, ...]:
    """Where ranges end, up to the first end at or beyond ``max_positions``; two for every octave beyond 8,192."""
    if max_positions < 1:
        raise InputError(f"a model reads at least 1 position, not {max_positions}")
    edges = list(_FIRST)
    while edges[-1] < max_positions:
        edges += [edges[-1] * 3 // 2, edges[-1] * 2]
    return tuple(edges[: next(i for i, edge in enumerate(edges) if edge >= max_positions) + 1])


def matrix_index(positions: Tensor, edges: tuple[int, ...]) -> Tensor:
    """positions int [tokens] -> the number of the range each is in, int32 [tokens]; beyond all: the last."""
    return torch.bucketize(positions.long(), _boundaries(edges, positions.device), right=True, out_int32=True)


@lru_cache(maxsize=64)
def _boundaries(edges: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges[:-1], dtype=torch.int64, device=device)
