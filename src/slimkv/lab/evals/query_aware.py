"""Query-aware rounding by itself: the error that queries see, with it and without, and what a search adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.codebook import codebook
from slimkv.codec.query_aware import DAMPING, isotropic_cost, query_aware_index, query_aware_matrix, unit_triangular
from slimkv.errors import InputError
from slimkv.lab.evals.plots import figure
from slimkv.spec import CodecSpec, ScalePolicy


@dataclass(frozen=True)
class RoundingRow:
    """Of one width: squared errors relative to those of rounding to the nearest level."""

    bits: int
    query_aware: float  # that queries see
    plain_scale: float  # the same with the scale policy ``plain``
    predicted: float  # the same, from the matrix alone
    second_sweep: float  # if every coordinate were rounded again, knowing the errors of all others
    search_2: float  # with the best of two roundings of every vector
    search_4: float  # of four
    isotropic: float  # of the key itself: what queries of no preferred direction would see
    isotropic_predicted: float


@dataclass(frozen=True)
class RoundingReport:
    """``slimkv eval query-aware``."""

    source: str
    head_dim: int
    vectors: int
    rows: tuple[RoundingRow, ...]


def skewed_moment(dim: int, seed: int = 0) -> Tensor:
    """A second moment whose eigenvalues fall from 1 to 1/1000, as those of trained heads do: float64 [dim, dim]."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -3, dim, dtype=torch.float64)) @ basis.mT


def measure_query_aware(
    moment: Tensor, bits: Sequence[int], *, source: str = "", vectors: int = 4096, seed: int = 0
) -> RoundingReport:
    """For queries of second moment float [dim, dim] and keys of random direction."""
    dim = moment.shape[-1]
    keys = torch.randn(vectors, dim, generator=torch.Generator().manual_seed(seed))
    rows = []
    for width in bits:
        codec = Codec(CodecSpec.parse(f"k{width}v4", dim))
        other = Codec(CodecSpec.parse(f"k{width}v4", dim, key_policy=ScalePolicy.PLAIN))
        query_aware = query_aware_matrix(moment, codec.key_rotation)
        plain = _errors(codec, keys, None)
        shaped = _errors(codec, keys, query_aware)
        rotated = codec.key_rotation.double()
        seen = rotated.T @ moment.double() @ rotated
        damped = seen / seen.diagonal().mean() + DAMPING * torch.eye(dim, dtype=torch.float64)
        base = _seen(plain, moment)
        factor = unit_triangular(moment, rotated)
        inverse = torch.linalg.inv(factor)
        rows.append(
            RoundingRow(
                width,
                _seen(shaped, moment) / base,
                _seen(_errors(other, keys, query_aware), moment) / base,
                float(torch.trace(inverse @ seen @ inverse.mT) / torch.trace(seen)),
                _seen(_second_sweep(codec, keys, query_aware, damped), moment) / base,
                _seen(_errors(codec, keys, query_aware, 2), moment) / base,
                _seen(_errors(codec, keys, query_aware, 4), moment) / base,
                float(shaped.square().sum() / plain.square().sum()),
                float(isotropic_cost(query_aware)),
            )
        )
    return RoundingReport(source, dim, vectors, tuple(rows))


def _errors(codec: Codec, keys: Tensor, query_aware: Tensor | None, search: int = 0) -> Tensor:
    """Errors of keys, in units of their own norm: float64 [vectors, dim]."""
    encoded = codec.encode_key(keys, query_aware=query_aware, query_aware_search=search)
    error = codec.decode_key(encoded) - keys
    return (error / keys.norm(dim=-1, keepdim=True)).double()


def _seen(error: Tensor, moment: Tensor) -> float:
    return float(torch.einsum("ni,ij,nj->", error, moment.double(), error))


def _standard(codec: Codec, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates in the codebook's units, its levels and boundaries, ascending."""
    book = codebook(codec.spec.key.bits, codec.spec.key_dim)
    rotated = keys @ codec.key_rotation
    standard = rotated / rotated.norm(dim=-1, keepdim=True) * (math.sqrt(codec.spec.key_dim) * book.unit)
    return standard, torch.tensor(book.levels).float(), torch.tensor(book.boundaries).float()


def _errors_of_levels(codec: Codec, standard: Tensor, levels: Tensor) -> Tensor:
    """As ``_errors``: of levels with the scale that keeps the norm."""
    size = standard.norm(dim=-1, keepdim=True)
    found = levels * (size / levels.norm(dim=-1, keepdim=True))
    return (((found - standard) / size) @ codec.key_rotation.T).double()


def _second_sweep(codec: Codec, keys: Tensor, query_aware: Tensor, damped: Tensor) -> Tensor:
    """Every coordinate once more, each to the level that is best given the errors of all others."""
    standard, levels, boundaries = _standard(codec, keys)
    index = query_aware_index(standard, levels, boundaries, query_aware, codec.key_tables.error_steps)
    chosen = levels[index].double()
    for i in range(standard.shape[-1] - 1, -1, -1):
        error = chosen - standard
        pull = (error @ damped[i] - error[:, i] * damped[i, i]) / damped[i, i]
        target = (standard[:, i] - pull).float()
        chosen[:, i] = levels[torch.bucketize(target, boundaries)].double()
    return _errors_of_levels(codec, standard, chosen.float())


def plot_query_aware(moment: Tensor, path: Path, bits: int = 4, vectors: int = 500) -> None:
    """Errors of keys in the plane of the directions queries look in most and least, before and after."""
    dim = moment.shape[-1]
    if dim < 2:
        raise InputError("a plane needs at least two dimensions")
    codec = Codec(CodecSpec.parse(f"k{bits}v4", dim))
    keys = torch.randn(vectors, dim, generator=torch.Generator().manual_seed(0))
    eigenvalues, axes_of = torch.linalg.eigh(moment.double())
    plane = axes_of[:, [0, -1]]
    points = {
        "rounded to the nearest level": _errors(codec, keys, None) @ plane,
        "query-aware": _errors(codec, keys, query_aware_matrix(moment, codec.key_rotation)) @ plane,
    }
    limit = 1.05 * max(float(p.abs().max()) for p in points.values())
    with figure(path, columns=2, width=4.2, height=4.9) as (_, panes):
        for pane, (title, xy) in zip(panes, points.items(), strict=True):
            pane.scatter(xy[:, 0], xy[:, 1], s=4, alpha=0.5, color="tab:blue", linewidths=0)
            angle = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
            circle = torch.stack([angle.cos(), angle.sin()])
            ellipse = 2 * torch.linalg.cholesky(torch.cov(xy.mT)) @ circle
            pane.plot(ellipse[0], ellipse[1], color="tab:red", linewidth=1.6, label="errors (two sigma)")
            spread = eigenvalues[[0, -1]].clamp(min=0).sqrt()
            look = 0.8 * limit * circle * (spread / spread.max())[:, None]
            pane.plot(look[0], look[1], color="black", linewidth=1.0, linestyle="--", label="where queries look")
            pane.set_xlim(-limit, limit)
            pane.set_ylim(-limit, limit)
            pane.set_aspect("equal")
            pane.set_xticks([])
            pane.set_yticks([])
            seen = float((xy.square() * eigenvalues[[0, -1]]).sum() / vectors)
            pane.set_title(
                f"{title}\nerror seen in this plane: {seen / _plane_error(points, eigenvalues):.2f}", fontsize=10
            )
            pane.set_xlabel("the direction queries look in least")
        panes[0].set_ylabel("the direction they look in most")
        panes[0].legend(loc="lower left", fontsize=7)


def _plane_error(points: dict[str, Tensor], eigenvalues: Tensor) -> float:
    first = next(iter(points.values()))
    return float((first.square() * eigenvalues[[0, -1]]).sum() / len(first))
