"""The workspace size of ``attend_latent``."""

from __future__ import annotations

import torch

from slimkv.arguments import typed
from slimkv.ops.attention.api import split_workspace_bytes
from slimkv.ops.cuda import cuda_unavailable_reason
from slimkv.ops.cuda.device import device_of
from slimkv.ops.latent.cuda import launch
from slimkv.spec import PageLayout


@typed
def latent_workspace_bytes(
    layout: PageLayout, *, total_queries: int, sequences: int, num_heads: int, max_query_len: int, num_splits: int,
    device: torch.device,
) -> int:  # fmt: skip
    """Bytes of a ``workspace`` that suffices for every backend of ``attend_latent`` on ``device``, within these bounds.

    ``total_queries`` counts the rows of the queries, padding included; ``num_splits`` is the argument of
    ``attend_latent``.
    """
    need = split_workspace_bytes(total_queries, num_heads, layout.spec.key_dim, num_splits)
    if cuda_unavailable_reason(device) is None and launch.runs_on(device):
        cuda = launch.workspace_bytes(layout, total_queries, sequences, num_heads, max_query_len, device_of(device))
        need = max(need, cuda)
    return need
