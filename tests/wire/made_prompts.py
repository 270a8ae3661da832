"""Small prompt caches with random bytes in their pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from slimkv.spec import CodecSpec
from slimkv.wire import Fingerprint, LayerFingerprint, LayerPages, PromptCache

MODEL = {"model_type": "llama", "hidden_size": 64, "rope": {"rope_theta": 10000.0}}


def layer(number: int, format: str = "k4v4", heads: int = 2, dim: int = 32, window: int | None = None):
    return LayerFingerprint.of(number, CodecSpec.parse(format, dim), heads, "float32", window)


def fingerprint(*layers: LayerFingerprint, **changes: Any) -> Fingerprint:
    fields = {"block_size": 16, "seed": 0x51, "dtype": "float32", "model": MODEL, "weights": "ab" * 32, **changes}
    return Fingerprint.of(layers or (layer(0), layer(1, "k5v3")), **fields)


def prompt(mark: Fingerprint | None = None, tokens: int = 40, first: dict[int, int] | None = None, seed: int = 0):
    mark = mark or fingerprint()
    source = torch.Generator().manual_seed(seed)
    layers = {}
    for x in mark.layers:
        begin = (first or {}).get(x.number, 0)
        blocks = -(-tokens // mark.block_size) - begin // mark.block_size
        page = x.layout(mark.seed, mark.block_size).page_bytes
        shape = (blocks, x.num_kv_heads, page)
        layers[x.number] = LayerPages(torch.randint(0, 256, shape, dtype=torch.uint8, generator=source), begin)
    return PromptCache(mark, tuple(range(100, 100 + tokens)), layers)


def with_tokens(cache: PromptCache, tokens: tuple[int, ...]) -> PromptCache:
    return replace(cache, tokens=tokens)
