"""The function that SGLang's n-gram drafts call on a CPU, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    requests: int,
    each: int,
) -> None:
    """Fills positions and links from ``tree_mask``, bool [requests * each * each]: whether j is i or its ancestor."""
    nodes = torch.arange(each)
    ancestors = tree_mask.view(requests, each, each).bool() & (nodes < nodes[:, None])
    parent = torch.where(ancestors, nodes, -1).amax(-1)  # [requests, each]
    positions.view(requests, each).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(requests * each).view(requests, each))
    child = torch.where(ancestors, nodes[:, None], each).amin(1)
    retrieve_next_token.copy_(torch.where(child < each, child, -1))
    siblings = (parent[:, :, None] == parent[:, None, :]) & (nodes[:, None] > nodes)  # [requests, later, node]
    sibling = torch.where(siblings, nodes[:, None], each).amin(1)
    retrieve_next_sibling.copy_(torch.where((parent >= 0) & (sibling < each), sibling, -1))
