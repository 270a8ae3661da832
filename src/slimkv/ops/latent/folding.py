"""Folds the rotation of the latent into the absorbed projections, so that decoding does not rotate.

Engines absorb the up-projections of a latent: q_latent = q_nope W_UK before attention, v = o_latent W_UV after it.
Latents are stored as c R, with R orthogonal. So q_nope (W_UK R) is in their stored space, and the attention output,
o_latent R, is multiplied by R^T W_UV.
"""

from __future__ import annotations

from torch import Tensor


def fold_key_projection(weight: Tensor, rotation: Tensor) -> Tensor:
    """W_UK [heads, nope_dim, latent_dim] and R [latent_dim, latent_dim] -> W_UK R, in the weight's dtype."""
    return (weight.float() @ rotation.to(weight.device)).to(weight.dtype)


def fold_value_projection(weight: Tensor, rotation: Tensor) -> Tensor:
    """W_UV [heads, latent_dim, v_dim] and R -> R^T W_UV, in the weight's dtype."""
    return (rotation.to(weight.device).T @ weight.float()).to(weight.dtype)
