"""The workspace size of ``attend``."""

from __future__ import annotations

import torch

from slimkv.arguments import typed
from slimkv.errors import InputError
from slimkv.ops.attention.api import split_workspace_bytes
from slimkv.ops.attention.cuda import decode
from slimkv.ops.cuda import cuda_unavailable_reason
from slimkv.spec import PageLayout


@typed
def workspace_bytes(
    layout: PageLayout, *, total_queries: int, sequences: int, num_heads: int, num_kv_heads: int, max_query_len: int,
    num_splits: int, device: torch.device,
) -> int:  # fmt: skip
    """Bytes of a ``workspace`` that suffices for every backend on ``device``, within these bounds.

    ``total_queries`` counts the rows of ``query``, padding included; ``num_splits`` is the argument of ``attend``.
    """
    counts = {"total_queries": total_queries, "sequences": sequences, "num_heads": num_heads,
              "num_kv_heads": num_kv_heads, "max_query_len": max_query_len, "num_splits": num_splits}  # fmt: skip
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    need = split_workspace_bytes(total_queries, num_heads, layout.spec.value_dim, num_splits)
    if cuda_unavailable_reason(device) is None:
        group = num_heads // num_kv_heads
        need = max(
            need, decode.workspace_bytes(layout, total_queries, sequences, num_kv_heads, group, max_query_len, device)
        )
    return need
