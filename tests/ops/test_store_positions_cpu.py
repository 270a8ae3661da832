"""Query-aware matrices by position, with every backend that supports them on a CPU."""

from __future__ import annotations

import torch

from slimkv import Codec, ops
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.ops import PackedKV, Rounding
from slimkv.spec import CodecSpec, page_layout


def test_each_token_takes_its_own_matrix():
    codec, tokens = Codec(CodecSpec.parse("k3v4", 64)), 16
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 2, 256, 64, generator=generator, dtype=torch.float64)
    queries[0] *= torch.logspace(0, -2, 64, dtype=torch.float64)
    queries[1] *= torch.logspace(-2, 0, 64, dtype=torch.float64)
    matrices = query_aware_matrix(queries.mT @ queries, codec.key_rotation)
    key, value = torch.randn(2, tokens, 2, 64, generator=generator)
    index, layout = torch.arange(tokens, dtype=torch.int32) % 3, page_layout(codec.spec, 16)
    stored = {}
    for backend in ("reference", "cpu", None):
        pages = torch.zeros(2, 2, layout.page_bytes, dtype=torch.uint8)
        ops.store_kv(
            key, value, PackedKV(pages, codec, layout), torch.arange(tokens), Rounding(matrices, index), backend=backend
        )
        stored[backend] = pages
    assert torch.equal(stored["cpu"], stored["reference"])
    assert torch.equal(stored[None], stored["reference"])
