"""The part of collecting statistics that engines share: the shifts of the probe, and sums over queries and keys.

An engine must expose the queries of each layer as attention receives them, and must read tokens at shifted positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.calibration.rotary import Rotary, measure_rotary
from slimkv.errors import InputError

PROBE_TOKENS = 64
_STEP = 32  # each shift is at most this many times the previous one


def probe_shifts(max_positions: int) -> tuple[int, ...]:
    """The shifts at which a probe of ``PROBE_TOKENS`` tokens is read again, in a model with this many positions."""
    longest = max_positions - PROBE_TOKENS
    if longest < 1:
        raise InputError(
            f"max_positions is {max_positions}, too few to measure the effect of positions on queries; "
            f"{PROBE_TOKENS + 1} are needed"
        )
    shifts = [1]
    while shifts[-1] * _STEP < longest:
        shifts.append(shifts[-1] * _STEP)
    return tuple(shifts) if shifts[-1] == longest else (*shifts, longest)


@dataclass(frozen=True)
class MeasuredRotary:
    """A layer's rotary embedding and the number of positions it was observed for (None: learned positions)."""

    rotary: Rotary
    max_positions: int | None


def rotary_of_layer(plain: Tensor, shifted: Mapping[int, Tensor]) -> MeasuredRotary:
    """Fits the embedding to queries of the probe float [n, dim] and to the same queries at ``probe_shifts``.

    If long shifts contradict short ones (frequencies that change with the length), the fit covers the short ones.
    ``max_positions`` is None if positions do not rotate queries (learned positions).
    """
    known = dict(sorted(shifted.items()))
    while known:
        found = measure_rotary(plain, known)
        if found is not None:
            return MeasuredRotary(found, max(known) + PROBE_TOKENS)
        known.popitem()
    return MeasuredRotary(Rotary.none(), None)


class LayerSums:
    """Sums of q q', of k, and of k at position 0 in one layer, rotated back to position 0."""

    def __init__(self, num_kv_heads: int, dim: int, rotary: Rotary, device: torch.device) -> None:
        self.rotary = rotary
        self.vectors = 0  # per KV head
        self.total = torch.zeros(num_kv_heads, dim, dim, dtype=torch.float64, device=device)
        self.keys = 0
        self.key_total = torch.zeros(num_kv_heads, dim, dtype=torch.float64, device=device)
        self.first_keys = torch.zeros((), dtype=torch.float64, device=device)
        self.first_total = torch.zeros_like(self.key_total)

    def add(self, query: Tensor, key: Tensor, positions: Tensor) -> None:
        """Adds query [tokens, num_heads, dim] and key [tokens, num_kv_heads, dim] at positions int [tokens].

        Several sequences at the same positions may be stacked along the head axis, each head's rows adjacent.
        """
        keys = self._grouped(key, positions)
        self.key_total += keys.sum(1)
        self.keys += keys.shape[1]
        first = (positions == 0).double().repeat(keys.shape[1] // max(len(positions), 1))
        self.first_total += (keys * first[:, None]).sum(1)
        self.first_keys += first.sum()
        queries = self._grouped(query, positions)
        self.total += queries.mT @ queries
        self.vectors += queries.shape[1]

    def _grouped(self, x: Tensor, positions: Tensor) -> Tensor:
        """Vectors by KV head, rotated back to position 0: float64 [num_kv_heads, vectors, dim]."""
        turned = self.rotary.turned(x, -positions)
        return turned.transpose(0, 1).reshape(self.total.shape[0], -1, x.shape[-1]).double()

    def query_moment(self) -> Tensor:
        """float64 [num_kv_heads, dim, dim] on the CPU."""
        return (self.total / max(self.vectors, 1)).cpu()

    def key_mean(self) -> Tensor:
        """float64 [num_kv_heads, dim] on the CPU."""
        return (self.key_total / max(self.keys, 1)).cpu()

    def first_key(self) -> Tensor:
        """The mean key at position 0: float64 [num_kv_heads, dim] on the CPU; the mean of all keys if there is none."""
        mean = self.first_total / self.first_keys.clamp(min=1)
        return torch.where(self.first_keys > 0, mean, self.key_total / max(self.keys, 1)).cpu()


def common_range(measured: Mapping[int, MeasuredRotary], wanted: int, probed: int, read: int) -> int:
    """The number of positions for which the statistics of all layers are valid.

    Args:
        measured: the rotary embedding of each layer.
        wanted: the requested range.
        probed: the end of the longest shift; a rotary embedding observed up to there is assumed beyond it.
        read: the number of positions read; learned positions are unknown beyond it.
    """
    ranges = [wanted]
    for found in measured.values():
        if found.max_positions is None:
            ranges.append(read)
        elif found.max_positions < probed:
            ranges.append(found.max_positions)
    return min(ranges)
