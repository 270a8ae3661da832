"""One prefill on a throw-away page while vLLM measures memory.

vLLM runs the model once without a cache to see what it needs beside it. What attention allocates for its largest step
would be missed, and its kernels would be compiled under the first user's request: so the step is run here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.integrations.vllm.backend import KERNEL_BLOCKS, PREFERRED_BLOCK
from slimkv.spec import PageLayout

_done: set[tuple[Any, ...]] = set()


def rehearse(
    query: Tensor,
    kv_heads: int,
    codec: Codec,
    options: ops.AttendOptions,
    config: Any,
    rounding: Tensor | None,
    impl: str | None,
) -> None:
    """Stores and attends as many new tokens as ``query`` has rows, as one request, once for each kind of layer."""
    if query.device.type == "cpu":  # nothing to compile, and vLLM is told the cache's size
        return
    block = config.cache_config.block_size
    block = block if block in KERNEL_BLOCKS else PREFERRED_BLOCK
    signature = codec.spec, kv_heads, query.shape, query.dtype, options.window, options.softcap, block, impl
    if signature in _done:
        return
    _done.add(signature)
    tokens, device = query.shape[0], query.device
    longest = max(config.model_config.max_model_len, tokens)
    layout = PageLayout(codec.spec, block)
    pages = torch.zeros(1, kv_heads, layout.region_bytes, dtype=torch.uint8, device=device)
    table = torch.zeros(1, layout.blocks_for(longest), dtype=torch.int32, device=device)
    lengths = torch.full((1,), tokens, dtype=torch.int32, device=device)
    starts = torch.arange(2, dtype=torch.int32, device=device) * tokens
    slots = torch.arange(tokens, device=device) % block
    spec = codec.spec
    key = torch.ones(tokens, kv_heads, spec.key_dim, dtype=query.dtype, device=device)
    value = torch.ones(tokens, kv_heads, spec.value_dim, dtype=query.dtype, device=device)
    ops.store(key, value, pages, slots, codec=codec, layout=layout, rounding=rounding, impl=impl)
    ops.attend(
        torch.ones_like(query), pages, table, lengths, starts, codec=codec, layout=layout, max_query_len=tokens,
        max_seq_len=longest, options=options, impl=impl,
    )  # fmt: skip
