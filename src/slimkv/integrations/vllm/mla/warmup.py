"""Each kind of step once, on a throw-away page, while the engine loads: so no request waits for a compiler."""

from __future__ import annotations

from typing import Any

import torch

from slimkv import ops
from slimkv.codec import Codec
from slimkv.integrations.vllm.warmup import kernel_block, verified_tokens
from slimkv.ops.warmup import decoding_steps
from slimkv.spec import LatentSpec, page_layout

_seen: set[tuple[Any, ...]] = set()


def compile_kernels(
    codec: Codec, num_heads: int, softmax_scale: float, dtype: torch.dtype, config: Any, backend: str | None
) -> int:
    """Stores, gathers and attends latents as the engine will; returns how many steps were run.

    A kind of layer is run once per process: one query a sequence and as many as are verified, short and long.
    """
    spec, device = codec.spec, codec.device
    assert isinstance(spec, LatentSpec)
    block = kernel_block(config)
    kind = (spec, num_heads, dtype, device, block, backend)
    if kind in _seen:
        return 0
    _seen.add(kind)
    layout = page_layout(spec, block)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device)
    steps = decoding_steps(config.model_config.max_model_len, verified_tokens(config))
    for step in steps:
        rows = step.sequences * step.queries
        latent, rope = (torch.ones(rows, dim, dtype=dtype, device=device) for dim in (spec.latent_dim, spec.rope_dim))
        slots = torch.arange(rows, device=device) % block
        ops.store_latent(latent, rope, pages, slots, codec=codec, layout=layout, backend=backend)
        ops.gather_latent(pages, slots, codec=codec, layout=layout, dtype=dtype)
        ops.attend_latent(
            latent[:, None].repeat(1, num_heads, 1), rope[:, None].repeat(1, num_heads, 1), pages,
            torch.zeros(step.sequences, layout.blocks_for(step.max_seq_len), dtype=torch.int32, device=device),
            torch.full((step.sequences,), step.queries, dtype=torch.int32, device=device),
            torch.arange(step.sequences + 1, dtype=torch.int32, device=device) * step.queries,
            softmax_scale=softmax_scale, codec=codec, layout=layout, max_query_len=step.queries,
            max_seq_len=step.max_seq_len, query_is_rotated=True, output_is_rotated=True, backend=backend,
        )  # fmt: skip
    return len(steps)
