"""The predicted cost of quantising each layer, from the calibration alone."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.statistics import LayerStatistics
from slimkv.codec.codebook import expected_distortion
from slimkv.codec.query_aware import unit_triangular
from slimkv.codec.rotation import block_size, signed_hadamard
from slimkv.errors import UnsupportedError

_POSITIONS = 1024  # in the windows on which costs are measured


def logit_noise(statistics: LayerStatistics, seed: int, query_aware: bool = True) -> Tensor:
    """E(q.e)^2 for a key of norm 1 whose codes have a squared error of 1: float64 [num_kv_heads].

    Plain rounding gives white errors, so this is the mean eigenvalue of the queries' second moment M. The errors of
    query-aware rounding solve L' e = w with w white, which gives the mean diagonal of inv(L) M inv(L').
    """
    dim = statistics.key_dim
    rotation = torch.tensor(signed_hadamard(dim, seed), dtype=torch.float64) / block_size(dim) ** 0.5
    seen = statistics.rotary.mean_moments(statistics.query_moment.double(), [(0, _POSITIONS)])[0]
    moment = rotation.T @ seen @ rotation
    if query_aware:
        factor = unit_triangular(seen, rotation)
        half = torch.linalg.solve_triangular(factor, moment, upper=False)
        moment = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    return moment.diagonal(dim1=-2, dim2=-1).mean(-1)


def predicted_cost(calibration: Calibration, layer: int, bits: int, side: str) -> float:
    """The cost of storing keys (``side`` "key") or values ("value") of a layer in ``bits`` bits.

    The cost is the KL divergence of the model's predictions on the calibration tokens, to first order. It is comparable
    between layers, sides and widths of one model.
    """
    statistics = calibration.statistics(layer)
    if statistics.key_weight is None or statistics.value_weight is None:
        raise UnsupportedError(
            f"{calibration.name} has no error costs for layer {layer}: make it with slimkv calibrate --budget or "
            "--profile. If those are missing again, the model's output projection was not found: choose formats by "
            "hand"
        )
    if side == "key":
        noise = logit_noise(statistics, calibration.seed)
        return expected_distortion(bits, statistics.key_dim) * float((statistics.key_weight * noise).sum())
    return expected_distortion(bits, statistics.value_dim) * float(statistics.value_weight.sum())
