"""Query-aware rounding: the same codes and decoder, with the error moved into directions that queries ignore.

A key's error e affects attention only through q.e. Its mean square over a head's queries is e' S e, with S their second
moment. With M = R' S R in rotated space and M = L D L' (L unit lower triangular), the cost is a sum of squares D_i (e_i
+ sum over j > i of L[j, i] e_j)^2. So coordinates are rounded from the last to the first, and each one is first
corrected for the errors made so far. Decoding does not change.

The corrections are sums, and the bytes must not depend on the order in which a device adds. So, as everywhere in
encoding, only integers are summed: L is stored in steps of 1/64 and errors in steps chosen for the codebook, both as
signed bytes. A sum of ``dim`` such products is below 2^24, so float32 (fused or not), int32 and tensor cores agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.errors import InputError

DAMPING = 0.2
WEIGHT_STEPS = 64.0  # entries of a rounding matrix are stored in steps of 1 / 64
LARGEST_BYTE = 127


def query_aware_matrix(second_moment: Tensor, rotation: Tensor, damping: float = DAMPING) -> Tensor:
    """The rounding matrix of keys for queries with this second moment: how errors of coordinate j correct coordinate i.

    Args:
        second_moment: float [..., dim, dim], symmetric and positive semidefinite: the mean of q q' over the (post-RoPE)
            queries of each KV head's group.
        rotation: float [dim, dim], the codec's ``key_rotation`` (x rotates to x @ rotation).
        damping: added to the diagonal, in units of its mean, to allow for queries that were not observed.

    Returns int8 [..., dim, dim], L[j, i] at [i, j] in steps of 1 / ``WEIGHT_STEPS``, zero where j <= i. The few entries
    beyond the range of a byte (127 / 64) are clamped.
    """
    weights = unit_triangular(second_moment, rotation, damping).mT * WEIGHT_STEPS
    return weights.triu(1).round().clamp(-LARGEST_BYTE, LARGEST_BYTE).to(torch.int8)


def unit_triangular(second_moment: Tensor, rotation: Tensor, damping: float = DAMPING) -> Tensor:
    """L of the module docstring before it is rounded to bytes: float64 [..., dim, dim]; see ``query_aware_matrix``."""
    dim = rotation.shape[-1]
    if second_moment.shape[-2:] != (dim, dim):
        raise InputError(
            f"the second moment is {list(second_moment.shape[-2:])}; for this rotation it must be [{dim}, {dim}]"
        )
    if not damping > 0:
        raise InputError(f"damping must be positive, not {damping}: it keeps the matrix invertible")
    moment, turn = second_moment.double(), rotation.double()
    if not torch.isfinite(moment).all():
        raise InputError("the second moment of the queries contains NaN or Inf")
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
    return factor / factor.diagonal(dim1=-2, dim2=-1)[..., None, :]


def query_aware_index(
    standard: Tensor, levels: Tensor, boundaries: Tensor, query_aware: Tensor, error_steps: float
) -> Tensor:
    """The index of the level of each coordinate: int64 [..., dim].

    Args:
        standard: float32 [..., dim], coordinates in the codebook's units.
        levels, boundaries: float32, ascending.
        query_aware: int8, broadcastable to [..., dim, dim]; only entries above its diagonal are used.
        error_steps: a power of two: steps per unit of the codebook in which errors are stored.
    """
    weights = query_aware.float()
    sums = torch.zeros_like(standard)  # integers: corrections in steps of 1 / (WEIGHT_STEPS * error_steps)
    index = torch.empty(standard.shape, dtype=torch.int64, device=standard.device)
    for j in range(standard.shape[-1] - 1, -1, -1):
        target = standard[..., j] - sums[..., j] * (1 / (WEIGHT_STEPS * error_steps))
        index[..., j] = torch.bucketize(target, boundaries)  # a value on a boundary takes the lower level
        level = levels[index[..., j]]
        error = ((level - standard[..., j]) * error_steps).clamp(-LARGEST_BYTE, LARGEST_BYTE).round()
        sums[..., :j] += weights[..., :j, j] * error[..., None]
    return index
