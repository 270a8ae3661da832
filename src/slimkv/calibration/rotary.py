"""Rotary position embeddings: measured from queries alone, and averaged over positions in closed form.

A rotary embedding rotates planes of two coordinates, each by its own frequency times the position. Attention with it is
relative: a window read ``s`` positions later has the same queries, rotated by ``s`` more positions. So reading one
short window twice reveals the frequencies, however the model names its embedding, pairs coordinates or scales
frequencies. Statistics of queries rotated back to position 0 then give the statistics at any other position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slimkv.errors import InputError

TOLERANCE = 0.02  # largest squared error, relative to the queries, at which a rotation counts as found
# Context lengths that one mean vector must fit (docs/design/centring.md).
CONTEXTS = (1024, 8192)
_SURPRISE = 0.03  # allowed deviation of angles over a long shift from what shorter ones predict: a mean of 1 - cos
_STILL = 1e-4  # squared change, relative to the queries, below which positions have no effect


@dataclass(frozen=True)
class Rotary:
    """The planes that rotate and their frequencies. Without planes, positions have no effect (NoPE)."""

    planes: Tensor  # int64 [planes, 2]
    frequencies: Tensor  # float64 [planes], radians per position

    @classmethod
    def none(cls) -> Rotary:
        """An embedding without planes."""
        return cls(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))

    @property
    def turns(self) -> bool:
        """Whether queries depend on their position."""
        return len(self.frequencies) > 0

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x float [tokens, ..., dim] rotated by ``positions`` int [tokens]: float32, the same shape."""
        out = x.float()
        if not self.turns:
            return out
        angle = positions.double()[:, None] * self.frequencies.to(positions.device)
        shape = (len(positions), *(1,) * (x.ndim - 2), -1)
        cos, sin = angle.cos().float().view(shape), angle.sin().float().view(shape)
        first, second = self.planes.to(x.device).unbind(1)
        a, b = out[..., first], out[..., second]
        out = out.clone()
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    def mean_moments(self, moment: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """The means of R_t S R_t' over positions t in each range [start, stop): float64 [ranges, ..., dim, dim].

        Args:
            moment: S, float64 [..., dim, dim], symmetric: the second moment of queries at position 0.
            ranges: (start, stop) positions; R_t rotates by t positions.
        """
        for start, stop in ranges:
            if not 0 <= start < stop:
                raise InputError(f"positions {start} to {stop} are not a range: start at 0 or later, and stop later")
        if not self.turns:
            return moment.double().expand(len(ranges), *moment.shape)
        basis, phases = self._eigenbasis(moment.shape[-1], moment.device)
        difference = phases[:, None] - phases[None, :]
        half = torch.remainder(difference + math.pi, 2 * math.pi) / 2 - math.pi / 2  # half the angle, in [-pi/2, pi/2)
        spun = basis @ moment.to(basis.dtype) @ basis.mH
        means = []
        for start, stop in ranges:
            count = stop - start
            divisor = count * torch.where(half == 0, 1.0, half.sin())
            ratio = torch.where(half.abs() < 1e-9, 1.0, (count * half).sin() / divisor)
            factor = torch.polar(torch.ones_like(half), (start + stop - 1) * half) * ratio
            mean = (basis.mH @ (spun * factor) @ basis).real
            means.append((mean + mean.mT) / 2)
        return torch.stack(means)

    def mean_vector(self, vector: Tensor, positions: int) -> Tensor:
        """The mean of R_t v over positions t in [0, positions): float64 [..., dim], for v float [..., dim]."""
        if positions < 1:
            raise InputError(f"positions must be 1 or more, not {positions}")
        out = vector.double().clone()
        if not self.turns:
            return out
        half = self.frequencies.to(out.device) / 2
        ratio = torch.where(half.sin().abs() < 1e-12, 1.0, (positions * half).sin() / (positions * half.sin()))
        cos, sin = ((positions - 1) * half).cos() * ratio, ((positions - 1) * half).sin() * ratio
        first, second = self.planes.to(out.device).unbind(1)
        a, b = out[..., first], out[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    def mean_of_contexts(self, vector: Tensor, positions: int) -> Tensor:
        """The mean of ``mean_vector`` over ``CONTEXTS``, each at most ``positions``.

        Slowly rotating planes are constant in a short context but not in a long one, and one vector must fit both.
        """
        means = [self.mean_vector(vector, min(context, positions)) for context in CONTEXTS]
        return torch.stack(means).mean(0)

    def _eigenbasis(self, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The basis that makes R_t diagonal: complex128 [dim, dim] (rows); its phases per position: float64 [dim]."""
        basis = torch.zeros(dim, dim, dtype=torch.complex128, device=device)
        phases = torch.zeros(dim, dtype=torch.float64, device=device)
        first, second = self.planes.to(device).unbind(1)
        still = torch.ones(dim, dtype=torch.bool, device=device)
        still[first] = still[second] = False
        basis[still, still] = 1
        for row, sign in ((first, 1), (second, -1)):
            basis[row, first] = 0.5**0.5
            basis[row, second] = sign * 1j * 0.5**0.5
            phases[row] = sign * self.frequencies.to(device)
        return basis, phases


def measure_rotary(plain: Tensor, shifted: Mapping[int, Tensor]) -> Rotary | None:
    """The embedding that maps queries float [n, dim] to those of ``shifted``: {positions later: float [n, dim]}.

    The shifts must begin with 1, each at most 64 times the previous one: each shift refines the frequencies enough to
    count whole turns over the next. Returns None if queries depend on the position in another way (learned positions,
    frequencies that depend on the length).
    """
    shifts = sorted(shifted)
    if not shifts or shifts[0] != 1 or any(b > 64 * a for a, b in pairwise(shifts)):
        raise InputError(f"shifts must begin with 1 and each be at most 64 times the previous one, not {shifts}")
    before = plain.double()
    after = {s: shifted[s].double() for s in shifts}
    energy = before.square().sum()
    if not energy > 0 or all((x - before).square().sum() <= _STILL * energy for x in after.values()):
        return Rotary.none()
    best: tuple[float, Rotary] | None = None
    for planes in _pairings(plain.shape[-1], plain.device):
        frequencies, surprise = _frequencies(before, after, planes)
        # Planes that hardly rotate within all shifts are dropped: their angles are rounding errors.
        keep = (frequencies * shifts[-1]).abs() > 1e-4
        found = Rotary(planes[keep].cpu(), frequencies[keep].cpu())
        error = max(_misfit(found, before, x, s) for s, x in after.items()) + (surprise > _SURPRISE)
        if best is None or error < 0.5 * best[0]:
            best = error, found
        if best[0] < TOLERANCE / 100:
            break
    assert best is not None
    return best[1] if best[0] <= TOLERANCE else None


def _pairings(dim: int, device: torch.device) -> Iterator[Tensor]:
    """Candidate pairings of coordinates, the usual ones first: int64 [planes, 2] each."""
    index = torch.arange(dim // 2 * 2, device=device)
    yield torch.stack(index.chunk(2), 1)  # halves, as in Llama
    yield index.view(-1, 2)  # neighbours, as in GPT-J
    for size in (dim // 2, dim // 4, *range(dim - 2, 1, -2)):  # halves of a part of the head, at either end
        for first in (0, dim - size):
            if size % 2 == 0 and size:
                yield torch.stack((first + torch.arange(size, device=device)).chunk(2), 1)


def _frequencies(before: Tensor, after: Mapping[int, Tensor], planes: Tensor) -> tuple[Tensor, float]:
    """The frequency of every plane, refined from the shortest shift to the longest (float64 [planes]), and the largest
    deviation from a predicted angle.

    For any angle over a long shift some frequency fits, so only the deviation from the prediction shows a misfit.
    """
    start = torch.complex(before[:, planes[:, 0]], before[:, planes[:, 1]])
    frequencies = torch.zeros(len(planes), dtype=torch.float64, device=before.device)
    energy, surprise = start.abs().square().sum(0), 0.0
    for shift in sorted(after):
        end = torch.complex(after[shift][:, planes[:, 0]], after[shift][:, planes[:, 1]])
        angle = (end * start.conj()).sum(0).angle()
        whole = ((frequencies * shift - angle) / (2 * math.pi)).round() if shift > 1 else 0.0
        if shift > 1:
            unexpected = 1 - (frequencies * shift - angle).cos()
            surprise = max(surprise, float((unexpected * energy).sum() / energy.sum()))
        frequencies = (angle + 2 * math.pi * whole) / shift
    return frequencies, surprise


def _misfit(rotary: Rotary, before: Tensor, after: Tensor, shift: int) -> float:
    """Squared error of the rotated queries, relative to the energy of ``after``."""
    turned = rotary.turned(before, torch.full((len(before),), shift, device=before.device))
    return float((turned - after).square().sum() / after.square().sum())
