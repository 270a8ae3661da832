"""A prefill and a decode step on a throw-away page while vLLM measures memory.

vLLM runs the model once without a cache to see what it needs beside it. What attention allocates for its largest step
would be missed, and its kernels would be compiled under the first user's requests: so its steps are run here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.integrations.vllm.page_sizes import KERNEL_BLOCKS, PREFERRED_BLOCK
from slimkv.spec import PageLayout

_SHORT = 128  # tokens; kernels may be cut differently for short sequences
_largest: dict[tuple[Any, ...], int] = {}


def profile_run(
    query: Tensor,
    num_kv_heads: int,
    codec: Codec,
    options: ops.AttendOptions,
    config: Any,
    query_aware: Tensor | None,
    query_aware_search: int,
    backend: str | None,
) -> None:
    """Stores and attends as many new tokens as ``query`` has rows, for each kind of layer and each new largest number.

    Then once each kind of step that decodes: one query a sequence and as many as are verified, short and long.
    """
    if query.device.type == "cpu":  # nothing to compile, and vLLM is told the cache's size
        return
    block = config.cache_config.block_size
    block = block if block in KERNEL_BLOCKS else PREFERRED_BLOCK
    signature = (
        codec.spec, num_kv_heads, query.shape[1:], query.dtype, options.sliding_window, options.softcap, block, backend,
        query_aware is None, query_aware_search,
    )  # fmt: skip
    tokens, before = query.shape[0], _largest.get(signature, 0)
    if tokens <= before:
        return
    _largest[signature] = tokens
    longest = max(config.model_config.max_model_len, tokens)
    layout = PageLayout(codec.spec, block)
    pages = torch.zeros(1, num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=query.device)
    _step(torch.ones_like(query), 1, longest, pages, codec, layout, options, query_aware, query_aware_search, backend)
    if before:
        return
    drafted = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
    for queries in {1, 1 + (drafted or 0)}:
        for length in {longest, min(longest, max(_SHORT, queries))}:
            few = query.new_ones(2 * queries, *query.shape[1:])
            _step(few, 2, length, pages, codec, layout, options, query_aware, query_aware_search, backend)


def _step(
    query: Tensor,
    sequences: int,
    longest: int,
    pages: Tensor,
    codec: Codec,
    layout: PageLayout,
    options: ops.AttendOptions,
    query_aware: Tensor | None,
    query_aware_search: int,
    backend: str | None,
) -> None:
    """``sequences`` requests that share the rows of ``query`` as new tokens, all in the one page there is."""
    tokens, device, spec = query.shape[0], query.device, codec.spec
    each = tokens // sequences
    table = torch.zeros(sequences, layout.blocks_for(longest), dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), each, dtype=torch.int32, device=device)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * each
    slots = torch.arange(tokens, device=device) % layout.block_size
    key = torch.ones(tokens, pages.shape[1], spec.key_dim, dtype=query.dtype, device=device)
    value = torch.ones(tokens, pages.shape[1], spec.value_dim, dtype=query.dtype, device=device)
    index = None
    if query_aware is not None and query_aware.ndim == 4:
        index = torch.zeros(tokens, dtype=torch.int32, device=device)
    ops.store_kv(
        key, value, pages, slots, codec=codec, layout=layout, query_aware=query_aware, query_aware_index=index,
        query_aware_search=query_aware_search, backend=backend,
    )  # fmt: skip
    ops.attend(
        query, pages, table, lengths, starts, codec=codec, layout=layout, max_query_len=each, max_seq_len=longest,
        options=options, backend=backend,
    )  # fmt: skip
