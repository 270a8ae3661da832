"""What engines rely on: CUDA graphs, no synchronization, no allocation, the same bits every time, large pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Built, Case, build, exact
from store_cases import Case as StoreCase
from store_cases import build as build_store
from store_cases import expected

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.ops import AttentionBatch, PackedKV
from slimkv.ops.attention.workspace import workspace_bytes

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("backend", ["triton", "cuda"])

DECODE = Case(dim=128, num_kv_heads=4, page=64, lens=(700, 33, 64, 129), queries=(1, 1, 1, 1), num_splits=4)
SPLITS = 4


def splits(backend: str) -> int | None:
    """The caller's ``num_splits``; the CUDA kernel partitions keys itself."""
    return SPLITS if backend == "triton" else None


def workspace_for(built: Built, num_splits: int = SPLITS) -> torch.Tensor:
    rows, heads = built.query.shape[:2]
    size = workspace_bytes(
        built.layout, total_queries=rows, sequences=len(built.case.lens), num_heads=heads,
        num_kv_heads=built.case.num_kv_heads, max_query_len=built.batch.max_query_len, num_splits=num_splits,
        device=built.query.device,
    )  # fmt: skip
    return torch.full((size,), 0xA5, dtype=torch.uint8, device=built.query.device)


def error(out: torch.Tensor, built: Built) -> float:
    want, _ = exact(built)
    return float(((out.double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


def changed(built: Built) -> Built:
    """The same tensors with other lengths and another order of sequences, written in place."""
    lens = [n - 5 for n in built.case.lens]
    order = torch.tensor([1, 0, 3, 2], device=built.pages.device)
    built.batch.block_table.copy_(built.batch.block_table[order].clone())
    built.batch.seq_lens.copy_(torch.tensor(lens, device=built.pages.device)[order])
    return replace(built, case=replace(built.case, lens=tuple(lens[i] for i in order.tolist())))


@both
def test_a_graph_follows_the_tables(backend, device):
    built = build(DECODE, device)
    space = workspace_for(built)
    out = torch.full((4, 16, 128), torch.nan, dtype=torch.bfloat16, device=device)
    call = {**built.arguments(), "out": out, "workspace": space, "num_splits": splits(backend), "backend": backend}
    ops.attend(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attend(**call)
    out.fill_(torch.nan)
    graph.replay()
    assert error(out, built) < 5e-3
    first = out.clone()
    other = changed(built)
    out.fill_(torch.nan)
    space.fill_(0xA5)
    graph.replay()
    replayed = out.clone()
    assert error(replayed, other) < 5e-3
    assert not torch.equal(replayed, first)
    out.fill_(torch.nan)
    ops.attend(**call)
    assert torch.equal(out, replayed)


@both
def test_a_graph_of_store_follows_keys_and_slots(backend, device):
    case = StoreCase(dim=128, heads=4, tokens=33, page=64)
    key, value, slots, pages, codec = build_store(case, device)
    kv = PackedKV(pages, codec, case.layout)
    ops.store_kv(key, value, replace(kv, pages=pages.clone()), slots, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.store_kv(key, value, kv, slots, backend=backend)
    assert (pages == 0xA5).all()  # capturing ran nothing
    key.copy_(key.flip(0).clone())
    slots.copy_(slots.roll(5))
    want = expected(key, value, slots, pages, codec, case.layout)
    graph.replay()
    assert torch.equal(pages, want)


@both
@pytest.mark.parametrize("case", [DECODE, replace(DECODE, lens=(700, 33, 64, 129), queries=(300, 1, 4, 2))], ids=str)
def test_the_same_bits_every_time(case, backend, device):
    built = build(case, device)
    runs = [built.attend_lse(backend, num_splits=splits(backend)) for _ in range(20)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(lse, runs[0][1])


@both
def test_nothing_waits_for_the_device(backend, device):
    """Decode, verification, prefill, store and gather read no value back to the host."""
    store_case = StoreCase(dim=128, heads=4, tokens=64)
    key, value, slots, pages, codec = build_store(store_case, device)
    cases = [build(case, device) for case in (
        DECODE,
        replace(DECODE, queries=(4, 2, 8, 1), sinks=True, window=50),
        replace(DECODE, queries=(300, 1, 40, 2)),
        replace(DECODE, queries=(300, 1, 40, 2), fresh=True),
    )]  # fmt: skip
    calls = [lambda b=b: ops.attend(**b.arguments(), backend=None if b.fresh else backend) for b in cases]
    calls.append(lambda: ops.store_kv(key, value, PackedKV(pages, codec, store_case.layout), slots, backend=backend))
    calls.append(lambda: ops.gather_kv(PackedKV(pages, codec, store_case.layout), slots))
    for call in calls:
        call()  # compiling may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
        with pytest.raises(RuntimeError):
            slots.max().item()  # the check itself works
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both
def test_decoding_allocates_nothing(backend, device):
    built = build(DECODE, device)
    out, space = torch.empty(4, 16, 128, dtype=torch.bfloat16, device=device), workspace_for(built)
    lse = torch.empty(4, 16, device=device)
    store_case = StoreCase(dim=128, heads=4, tokens=4)
    key, value, slots, pages, codec = build_store(store_case, device)

    def step() -> None:
        ops.store_kv(key, value, PackedKV(pages, codec, store_case.layout), slots, backend=backend)
        ops.attend(**built.arguments(), out=out, lse=lse, workspace=space, num_splits=splits(backend), backend=backend)

    def count() -> int:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    step()
    before = count()
    step()
    assert count() == before
    ops.attend(**built.arguments(), out=out, num_splits=splits(backend), backend=backend)
    assert count() > before  # without a workspace, it allocates


@both
def test_a_pool_beyond_two_gigabytes(backend, device):
    """Blocks whose addresses do not fit 31 or 32 bits: store, attend and gather."""
    layout = PageLayout(CodecSpec.parse("k4v4", 128), 16)
    heads, tokens = 8, 100
    blocks = 5 * 2**30 // (heads * layout.page_bytes)
    pages = torch.empty(blocks, heads, layout.page_bytes, dtype=torch.uint8, device=device)
    assert pages.numel() > 2**32
    codec = Codec(layout.spec, device)
    table = torch.arange(blocks - layout.blocks_for(tokens), blocks, dtype=torch.int32, device=device)[None]
    position = torch.arange(tokens, device=device)
    slots = table[0, position // 16].long() * 16 + position % 16
    g = torch.Generator(device).manual_seed(0)
    key, value = torch.randn(2, tokens, heads, 128, generator=g, device=device)
    query = torch.randn(2, 32, 128, generator=g, device=device)
    ops.store_kv(key, value, PackedKV(pages, codec, layout), slots, backend=backend)
    low = torch.arange(table.shape[1], dtype=torch.int32, device=device)[None]
    alone = torch.full((table.shape[1], heads, layout.page_bytes), 0xA5, dtype=torch.uint8, device=device)
    ops.store_kv(key, value, PackedKV(alone, codec, layout), position, backend=backend)
    written = ops.gather_kv(PackedKV(alone, codec, layout), position, backend="reference")
    for one, other in zip(ops.gather_kv(PackedKV(pages, codec, layout), slots), written, strict=True):
        assert torch.allclose(one, other, atol=1e-5)

    def same_rows(query: torch.Tensor) -> None:
        starts = torch.tensor([0, len(query)], dtype=torch.int32, device=device)
        high = AttentionBatch(
            table, torch.tensor([tokens], dtype=torch.int32, device=device), starts, len(query), tokens
        )
        want = ops.attend(query, PackedKV(alone, codec, layout), replace(high, block_table=low), backend=backend)
        assert torch.equal(ops.attend(query, PackedKV(pages, codec, layout), high, backend=backend), want)

    for queries in (1, 2):
        same_rows(query[:queries])
    same_rows(torch.randn(64, 32, 128, generator=g, device=device))
