"""Distortion of the Lloyd-Max codes on random directions, compared with theoretical values.

python benchmarks/distortion.py --head-dim 128
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.codec.codebook import expected_distortion
from slimkv.lab.report.page import table_line
from slimkv.spec import CodecSpec, ScalePolicy

WIDTHS = tuple(range(1, 9))
QUERIES = 1024
NUMBERS = 1 << 21  # values encoded per width; the sampling error is then about the same for every head size
_GAUSSIAN_DIM = 10**8  # with this many dimensions a coordinate is Gaussian to eight digits


@dataclass(frozen=True)
class PolicyDistortion:
    """One scale policy at one width."""

    policy: str
    mse: float  # mean of |x - x_hat|^2 / |x|^2
    slope: float  # of <q, x_hat> regressed on <q, x> over random queries
    slope_theory: float  # 1 - D, sqrt(1 - D) or 1, where D is the plain policy's mse


@dataclass(frozen=True)
class WidthDistortion:
    """One width: the measured error of the plain policy and the theoretical values."""

    bits: int
    mse: float
    gaussian_optimum: float
    dim_optimum: float  # mse of the Lloyd-Max codebook for one coordinate of a random unit vector
    paper_bound: float  # sqrt(3) pi / 2 / 4^bits
    over_gaussian: float  # mse / gaussian_optimum
    over_dim: float  # mse / dim_optimum
    policies: tuple[PolicyDistortion, ...]


@dataclass(frozen=True)
class DistortionReport:
    """Results for all widths."""

    head_dim: int
    vectors: int
    queries: int
    seed: int
    widths: tuple[WidthDistortion, ...]


def gaussian_optimum(bits: int) -> float:
    """Mean squared error of the optimal codebook of ``2 ** bits`` centroids for a Gaussian of variance 1."""
    return expected_distortion(bits, _GAUSSIAN_DIM, exact=True)


def paper_bound(bits: int) -> float:
    """TurboQuant's upper bound on the distortion, sqrt(3) pi / 2 / 4^bits."""
    return math.sqrt(3) * math.pi / 2 / 4**bits


def slope_theory(policy: ScalePolicy, distortion: float) -> float:
    """The expected slope of <q, x_hat> over <q, x> if the plain policy's distortion is ``distortion``."""
    if policy == ScalePolicy.PLAIN:
        return 1 - distortion
    return math.sqrt(1 - distortion) if policy == ScalePolicy.NORM else 1.0


def measure_policy(x: Tensor, query: Tensor, bits: int, policy: ScalePolicy) -> tuple[float, float]:
    """x [n, dim], query [q, dim] -> mean squared error over squared norm, and the regression slope."""
    spec = CodecSpec.parse(f"k{bits}v{bits}", x.shape[-1], key_policy=policy)
    codec = Codec(spec, x.device)
    restored = codec.decode_key(codec.encode_key(x))
    mse = ((restored - x).square().sum(-1).double() / x.square().sum(-1).double()).mean()
    # Summed over all pairs (q, x): <q, x> <q, x_hat> = x' (q q') x_hat, so only the second moment of q is needed.
    x, restored, moment = x.double(), restored.double(), (query.T @ query).double()
    slope = (x @ moment * restored).sum() / (x @ moment * x).sum()
    return float(mse), float(slope)


def measure_distortion(
    head_dim: int,
    widths: Sequence[int] = WIDTHS,
    policies: Sequence[ScalePolicy] = tuple(ScalePolicy),
    *,
    seed: int = 0,
    vectors: int | None = None,
    device: torch.device | str = "cpu",
) -> DistortionReport:
    """Encodes and decodes random directions (with random norms) at every width and policy."""
    CodecSpec.parse("k4v4", head_dim)  # raises for a bad head size before the work starts
    count = vectors if vectors is not None else max(1024, NUMBERS // head_dim)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, head_dim, generator=generator)
    x = x / x.norm(dim=-1, keepdim=True) * torch.exp2(6 * torch.rand(count, 1, generator=generator) - 3)
    query = torch.randn(QUERIES, head_dim, generator=generator)
    x, query = x.to(device), query.to(device)
    rows = [_measure_width(x, query, bits, policies) for bits in widths]
    return DistortionReport(head_dim, count, QUERIES, seed, tuple(rows))


def _measure_width(x: Tensor, query: Tensor, bits: int, policies: Sequence[ScalePolicy]) -> WidthDistortion:
    plain = measure_policy(x, query, bits, ScalePolicy.PLAIN)
    measured = []
    for policy in policies:
        mse, slope = plain if policy == ScalePolicy.PLAIN else measure_policy(x, query, bits, policy)
        measured.append(PolicyDistortion(policy.value, mse, slope, slope_theory(policy, plain[0])))
    gaussian, own = gaussian_optimum(bits), expected_distortion(bits, x.shape[-1], exact=True)
    return WidthDistortion(
        bits, plain[0], gaussian, own, paper_bound(bits), plain[0] / gaussian, plain[0] / own, tuple(measured)
    )


def main() -> None:
    """Prints the tables of docs/design/codec.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    report = measure_distortion(**vars(parser.parse_args()))
    print(f"squared error / squared norm, head size {report.head_dim}, {report.vectors} random directions")
    print(
        table_line(
            ["bits", "measured", "Gaussian optimum", "ratio", f"optimum for {report.head_dim}", "ratio", "bound"]
        )
    )
    for w in report.widths:
        figures = w.mse, w.gaussian_optimum, w.over_gaussian, w.dim_optimum, w.over_dim, w.paper_bound
        print(table_line([str(w.bits), *(f"{x:.6f}" for x in figures)]))
    print("slope of <q, x_hat> on <q, x>: measured (theory)")
    print(table_line(["bits", *(p.policy for p in report.widths[0].policies)]))
    for w in report.widths:
        print(table_line([str(w.bits), *(f"{p.slope:.5f} ({p.slope_theory:.5f})" for p in w.policies)]))


if __name__ == "__main__":
    main()
