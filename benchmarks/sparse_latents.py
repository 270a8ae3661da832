"""Times a decode step of sparse latent attention on a Hopper GPU: `c4` in token rows against FlashMLA's `fp8_ds_mla`.

    python benchmarks/sparse_latents.py [--picked 2048]

Every query attends to random tokens of a KV cache that is far larger than the L2 cache. FlashMLA comes from the
installed vLLM and supports 64 or 128 heads; queries with fewer heads are padded, as in vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from slimkv import Codec, ops
from slimkv.spec import LatentSpec, page_layout

TOKENS, SCALE = 1 << 20, 192**-0.5
CELLS = [(32, 128), (64, 128), (128, 128), (8, 128), (128, 64), (128, 16)]  # queries, heads
DEVICE = torch.device("cuda")


def microseconds(call: Callable[[], object], count: int = 20) -> float:
    """Time per call: the shortest of five replays of a CUDA graph of `count` calls, divided by `count`."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count * 1e3)
    return min(times)


def packed_cache() -> ops.PackedKV:
    """A packed cache of random latents."""
    spec = LatentSpec.parse("c4").with_raw_dtype("bfloat16")
    layout = page_layout(spec, 64, True)
    pages = torch.empty(TOKENS // 64, layout.page_bytes, dtype=torch.uint8, device=DEVICE)
    kv = ops.PackedKV(pages, Codec(spec, DEVICE), layout)
    for first in range(0, TOKENS, 1 << 16):
        latent, rope = (torch.randn(1 << 16, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64))
        slots = torch.arange(first, first + (1 << 16), device=DEVICE)
        ops.store_latent(latent, rope, kv, slots)
    return kv


def slimkv(kv: ops.PackedKV, queries: int, heads: int, picked: int) -> float:
    """Time of a step with slimkv, in microseconds."""
    latent, rope = (torch.randn(queries, heads, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64))
    slots = torch.randint(0, TOKENS, (queries, picked), dtype=torch.int32, device=DEVICE)
    lens = torch.full((queries,), picked, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(queries + 1, dtype=torch.int32, device=DEVICE)
    batch = ops.AttentionBatch(slots, lens, starts, 1, picked)
    out = torch.empty_like(latent)
    return microseconds(
        lambda: ops.attend_latent(
            latent, rope, kv, batch, softmax_scale=SCALE, query_is_rotated=True, output_is_rotated=True, out=out
        )
    )  # fmt: skip


def flashmla(queries: int, heads: int, picked: int) -> float:
    """Time of a step with vLLM's FLASHMLA_SPARSE, in microseconds.

    The faster of two shapes: a batch of sequences with one query each, and one sequence with all queries.
    """
    from vllm.v1.attention.ops import flashmla as module

    cache = torch.randint(0, 100, (TOKENS // 64, 64, 1, 656), dtype=torch.uint8, device=DEVICE)
    cache[..., 512:528] = torch.full((4,), 0.02, device=DEVICE).view(torch.uint8)
    cache[..., 528:] = torch.randn(64, device=DEVICE).to(torch.bfloat16).view(torch.uint8)
    times = []
    for shape in ((queries, 1), (1, queries)):
        query = torch.randn(*shape, 64 if heads <= 64 else 128, 576, device=DEVICE, dtype=torch.bfloat16)
        arguments = {
            "block_table": torch.zeros(shape[0], 1, dtype=torch.int32, device=DEVICE),
            "cache_seqlens": torch.full((shape[0],), TOKENS, dtype=torch.int32, device=DEVICE),
            "indices": torch.randint(0, TOKENS, (*shape, picked), dtype=torch.int32, device=DEVICE),
            "tile_scheduler_metadata": module.get_mla_metadata()[0], "head_dim_v": 512, "is_fp8_kvcache": True,
        }  # fmt: skip
        times.append(
            microseconds(
                lambda q=query, a=arguments: module.flash_mla_with_kvcache(q=q, k_cache=cache, softmax_scale=SCALE, **a)
            )
        )
    return min(times)


def main() -> None:
    """Prints a table of times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picked", type=int, default=2048, help="tokens that a query attends")
    picked = parser.parse_args().picked
    cache = packed_cache()
    print("| queries, heads | `c4` | FlashMLA `fp8_ds_mla` | time ratio |\n| --- | --- | --- | --- |")
    for queries, heads in CELLS:
        ours, theirs = slimkv(cache, queries, heads, picked), flashmla(queries, heads, picked)
        print(f"| {queries}, {heads} | {ours:.1f} µs | {theirs:.1f} µs | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
