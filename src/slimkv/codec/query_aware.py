"""Query-aware rounding: the same codes and the same decoder, with the error moved to where no query looks.

Attention does not see a key's error e but q.e; over the queries of a head that costs e' S e, S their second moment.
With M = R' S R in rotated space and M = L D L' (L unit lower triangular), the cost is a sum of squares
D_i (e_i + sum over j > i of L[j, i] e_j)^2. So coordinates are rounded from the last to the first, each one after it
has been corrected for the errors made so far. Only encoding knows of it.

The corrections are sums, and the bytes must not depend on the order in which a device adds. So, as everywhere in
encoding, integers are summed: L is held in steps of 1/64 and errors in steps that suit the codebook, both as signed
bytes. A sum of ``dim`` such products is below 2^24, so float32 (fused or not), int32 and tensor cores give the same.

A search rounds each vector under several scales and keeps the best. The scale that is stored with the codes makes up
for it, so this too concerns encoding alone. Under another scale all coordinates fall elsewhere between the levels;
what counts is the sum over i of (e_i + sum over j > i of L[j, i] e_j)^2: the D_i differ little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.spec import ScalePolicy, TensorFormat

DAMPING = 0.3
WEIGHT_STEPS = 64.0  # of a rounding matrix's entry, per 1.0
LARGEST_BYTE = 127
# By how many roundings a search tries: evenly spaced, exact in any float. Chosen on keys of SmolLM2 at 2 to 6 bits.
SEARCH_SCALES = {2: (62 / 64, 68 / 64), 4: (59 / 64, 63 / 64, 67 / 64, 71 / 64)}


def query_aware_matrix(second_moment: Tensor, rotation: Tensor, damping: float = DAMPING) -> Tensor:
    """How much the error of coordinate j corrects coordinate i, for keys read by queries of this second moment.

    Args:
        second_moment: float [..., dim, dim], symmetric and positive semidefinite: the mean of q q' over the (post-RoPE)
            queries of each KV head's group.
        rotation: float [dim, dim], the codec's ``key_rotation`` (x rotates to x @ rotation).
        damping: added to the diagonal in units of its mean: how much is kept for queries that were not seen.

    Returns int8 [..., dim, dim], L[j, i] at [i, j] in steps of 1 / ``WEIGHT_STEPS``, zero where j <= i. The few entries
    beyond what a byte holds (127 / 64) are cut to it.
    """
    weights = unit_triangular(second_moment, rotation, damping).mT * WEIGHT_STEPS
    return weights.triu(1).round().clamp(-LARGEST_BYTE, LARGEST_BYTE).to(torch.int8)


def unit_triangular(second_moment: Tensor, rotation: Tensor, damping: float = DAMPING) -> Tensor:
    """L of the module's text, before it is put in bytes: float64 [..., dim, dim]; see ``query_aware_matrix``."""
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
    return factor / factor.diagonal(dim1=-2, dim2=-1)[..., None, :]


def isotropic_cost(query_aware: Tensor) -> Tensor:
    """By what factor a rounding matrix multiplies the squared error of a key.

    That is the error that queries of no preferred direction see. The errors e solve L' e = w with w as large as plain
    rounding's: the factor is the mean squared norm of the columns of the inverse of L. int8 [..., dim, dim] ->
    float64 [...].
    """
    identity = torch.eye(query_aware.shape[-1], dtype=torch.float64, device=query_aware.device).expand(
        query_aware.shape
    )
    upper = query_aware.double().triu(1) / WEIGHT_STEPS + identity
    inverse = torch.linalg.solve_triangular(upper, identity, upper=True, unitriangular=True)
    return inverse.square().sum((-2, -1)) / query_aware.shape[-1]


def query_aware_index(
    standard: Tensor, levels: Tensor, boundaries: Tensor, query_aware: Tensor, error_steps: float
) -> Tensor:
    """Which level each coordinate gets: int64 [..., dim].

    Args:
        standard: float32 [..., dim], coordinates in the codebook's units.
        levels, boundaries: float32, ascending.
        query_aware: int8, broadcastable to [..., dim, dim]; only what is above its diagonal is used.
        error_steps: a power of two: how finely errors are held, per unit of the codebook.
    """
    return _round(standard, levels, boundaries, query_aware, error_steps)[0]


def searched_index(
    standard: Tensor, levels: Tensor, boundaries: Tensor, query_aware: Tensor, error_steps: float, search: int
) -> Tensor:
    """``query_aware_index`` of the best of ``search`` scaled copies of each vector; the first one of equals."""
    best, least = torch.zeros(0), torch.zeros(0)
    for scale in SEARCH_SCALES[check_search(search)]:
        index, cost = _round(standard * scale, levels, boundaries, query_aware, error_steps)
        cost = cost * scale_weight(scale)
        if not len(best):
            best, least = index, cost
            continue
        best = torch.where((cost < least)[..., None], index, best)
        least = torch.minimum(cost, least)
    return best


def check_search(search: object) -> int:
    """``search``, if that many scales are known."""
    if isinstance(search, bool) or not isinstance(search, int) or search not in SEARCH_SCALES:
        known = " or ".join(map(str, SEARCH_SCALES))
        raise InputError(f"query_aware_search must be 0 (off), {known}, not {search!r}")
    return search


def check_searchable(search: int, query_aware: bool, fmt: TensorFormat) -> None:
    """Raises unless a search of that size may round keys of ``fmt``; ``query_aware``: whether there is a matrix."""
    if isinstance(search, int) and not isinstance(search, bool) and search == 0:
        return
    check_search(search)
    if not query_aware:
        raise InputError(
            f"query_aware_search={search} tries several query-aware roundings, but query_aware is None: give a matrix"
        )
    if fmt.policy == ScalePolicy.PLAIN:
        raise InputError(
            f"query_aware_search={search} needs a scale that follows the codes; the scale policy plain has none: use "
            f"{ScalePolicy.NORM} or {ScalePolicy.UNBIASED}"
        )


def scale_weight(scale: float) -> float:
    """What makes costs under ``scale`` comparable: 1 / scale^2 (which is exact), rounded to float32."""
    return float(torch.ones(()) / scale**2)


def _round(
    standard: Tensor, levels: Tensor, boundaries: Tensor, query_aware: Tensor, error_steps: float
) -> tuple[Tensor, Tensor]:
    """The levels' numbers int64 [..., dim], and what they cost, float32 [...].

    The cost is the sum of squared distances of levels from their targets, in steps of errors: one rounded product and
    one rounded sum for each coordinate, in the order in which they are rounded.
    """
    weights = query_aware.float()
    cost = torch.zeros_like(standard[..., 0])
    sums = torch.zeros_like(standard)  # integers: corrections in steps of 1 / (WEIGHT_STEPS * error_steps)
    index = torch.empty(standard.shape, dtype=torch.int64, device=standard.device)
    for j in range(standard.shape[-1] - 1, -1, -1):
        target = standard[..., j] - sums[..., j] * (1 / (WEIGHT_STEPS * error_steps))
        index[..., j] = torch.bucketize(target, boundaries)  # a value on a boundary takes the lower level
        level = levels[index[..., j]]
        error = ((level - standard[..., j]) * error_steps).clamp(-LARGEST_BYTE, LARGEST_BYTE).round()
        distance = (level - target) * error_steps
        cost = cost + distance * distance
        sums[..., :j] += weights[..., :j, j] * error[..., None]
    return index, cost
