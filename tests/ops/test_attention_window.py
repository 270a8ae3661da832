"""Tokens before every query's window may hold any bytes: their blocks may already belong to another sequence."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.codec.pack import page_tables
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV
from tail import sample

SIZE, LENGTH, WINDOW, DIM = 16, 61, 9, 32


POISONS = (0xFF, 0xF0)  # invalid scales, and large ones
CASES = product(["k4v4", "k8v5", "fp8", "ku4vu4", "raw"], (1, 3, 30), POISONS)


@pytest.mark.parametrize(("format", "queries", "poison"), sample(CASES, 5))
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_no_query_sees_changes_no_bit(format, queries, backend, poison):
    if backend == "triton":
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(queries)
    layout = PageLayout(CodecSpec.parse(format, DIM), SIZE)
    codec = Codec(layout.spec, torch.device("cpu"))
    raw = getattr(torch, layout.spec.key.raw_dtype) if format == "raw" else torch.float32
    key, value = (torch.randn(LENGTH, 1, DIM, generator=generator).to(raw) for _ in range(2))
    pages = torch.zeros(-(-LENGTH // SIZE), 1, layout.page_bytes, dtype=torch.uint8)
    ops.store_kv(key, value, PackedKV(pages, codec, layout), torch.arange(LENGTH), backend="reference")
    hidden = torch.arange(LENGTH - queries - WINDOW + 1)
    poisoned = pages.clone()
    offsets = page_tables(layout, pages.device).byte_offsets[hidden % SIZE]
    poisoned[(hidden // SIZE)[:, None], 0, offsets] = poison
    query = torch.randn(queries, 2, DIM, generator=generator)
    table, lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[*range(len(pages))]], [LENGTH], [0, queries]))
    batch, options = AttentionBatch(table, lens, starts, queries, LENGTH), AttendOptions(sliding_window=WINDOW)
    outs = [
        ops.attend(query, PackedKV(each, codec, layout), batch, options, backend=backend) for each in (pages, poisoned)
    ]
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
