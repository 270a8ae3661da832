"""Query-aware rounding: the same codes and the same decoder, with the error moved to where no query looks.

Attention does not see a key's error e but q.e; over the queries of a head that costs e' S e, S their second moment.
With M = R' S R in rotated space and M = L D L' (L unit lower triangular), the cost is a sum of squares
D_i (e_i + sum over j > i of L[j, i] e_j)^2. So coordinates are rounded from the last to the first, and each time the
coordinates still to come are corrected for the error just made. Only encoding knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.errors import InputError

DAMPING = 0.3


def rounding_matrix(second_moment: Tensor, rotation: Tensor, damping: float = DAMPING) -> Tensor:
    """L for keys that are read by queries of this second moment.

    Args:
        second_moment: float [..., dim, dim], symmetric and positive semidefinite: the mean of q q' over the (post-RoPE)
            queries of each KV head's group.
        rotation: float [dim, dim], the codec's ``key_rotation`` (x rotates to x @ rotation).
        damping: added to the diagonal in units of its mean: how much is kept for queries that were not seen.

    Returns float32 [..., dim, dim], unit lower triangular.
    """
    dim = rotation.shape[-1]
    if second_moment.shape[-2:] != (dim, dim):
        raise InputError(
            f"the second moment is {list(second_moment.shape[-2:])}; for this rotation it must be [{dim}, {dim}]"
        )
    if not damping > 0:
        raise InputError(f"damping must be positive, not {damping}: it is what keeps the matrix invertible")
    moment, turn = second_moment.double(), rotation.double()
    if not torch.isfinite(moment).all():
        raise InputError("the second moment of the queries has NaN or Inf in it")
    shaped = turn.T @ ((moment + moment.mT) / 2) @ turn
    mean = shaped.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    identity = torch.eye(dim, dtype=torch.float64, device=moment.device)
    shaped = torch.where(mean > 0, shaped / torch.where(mean > 0, mean, 1.0), 0.0) + damping * identity
    factor, failed = torch.linalg.cholesky_ex(shaped)
    if failed.any():
        raise InputError(
            f"{int((failed > 0).sum())} second moment(s) are not positive semidefinite even with damping {damping}; "
            "they must be means of q q' over queries"
        )
    return (factor / factor.diagonal(dim1=-2, dim2=-1)[..., None, :]).float()


def isotropic_cost(rounding: Tensor) -> Tensor:
    """By what factor L multiplies the squared error of a key, so the error that queries of no preferred direction see.

    The errors e solve L' e = w with w as large as plain rounding's: the factor is the mean squared norm of the columns
    of the inverse of L. float [..., dim, dim] -> float64 [...].
    """
    dim = rounding.shape[-1]
    identity = torch.eye(dim, dtype=torch.float64, device=rounding.device)
    inverse = torch.linalg.solve_triangular(rounding.double(), identity.expand(rounding.shape), upper=False)
    return inverse.square().sum((-2, -1)) / dim


def shaped_index(standard: Tensor, levels: Tensor, boundaries: Tensor, rounding: Tensor) -> Tensor:
    """Which level each coordinate gets: int64 [..., dim].

    Args:
        standard: float32 [..., dim], coordinates in the codebook's units.
        levels, boundaries: float32, ascending.
        rounding: float32, broadcastable to [..., dim, dim]; only what is below its diagonal is used.

    Every correction is one multiplication and one subtraction, in the order in which errors are made: no sum is taken
    whose order a device could change.
    """
    target = standard.clone()
    index = torch.empty(standard.shape, dtype=torch.int64, device=standard.device)
    for j in range(standard.shape[-1] - 1, -1, -1):
        index[..., j] = torch.bucketize(target[..., j].contiguous(), boundaries)
        error = levels[index[..., j]] - standard[..., j]
        target[..., :j] = target[..., :j] - rounding[..., j, :j] * error[..., None]
    return index
