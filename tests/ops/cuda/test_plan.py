"""Calls that repeat what they did a step ago give what single calls give, and notice what has changed."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from weakref import ref

import host
import pytest
import torch
from test_decode_cuda import SMALL_GPU
from test_decode_cuda import launch as launch_attend

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.ops.attention.api import REGISTRY as ATTEND
from slimkv.ops.attention.cuda import decode as attend_cuda
from slimkv.ops.plan import RepeatedAttend, RepeatedStore
from slimkv.ops.registry import Backend
from slimkv.ops.store.api import REGISTRY as STORE
from slimkv.ops.store.cuda import launch as store_cuda

pytestmark = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
SPEC = CodecSpec.parse("k4v4", 32)
LAYOUT = PageLayout(SPEC, 16)
HEADS, KV_HEADS, BLOCKS = 2, 1, 6


class Kernel:
    """The emulated kernel behind ``Module.kernel(name)``."""

    def __init__(self, source, defines):
        self.source, self.defines = source, defines

    def kernel(self, name):
        self.name = name
        return self

    def launch(self, grid, threads, shared, args, device, overlap=False):
        library = host.compile(Path(self.source), self.defines)
        host.launch(library, self.name, grid=grid, threads=threads, shared=shared, args=args)

    def bound(self, *call, overlap=False):
        return partial(self.launch, *call, overlap)


@pytest.fixture(autouse=True)
def emulated_gpu(monkeypatch):
    """The CUDA implementations on the CPU."""
    for registry in (ATTEND, STORE):
        own = registry._by_name["cuda"]
        cuda = Backend("cuda", own.module, lambda device: None)
        monkeypatch.setattr(registry, "_by_name", {**registry._by_name, "cuda": cuda})
    monkeypatch.setattr(attend_cuda, "device_of", lambda device: SMALL_GPU)
    monkeypatch.setattr(attend_cuda, "_launcher", lambda device: launch_attend)
    monkeypatch.setattr(attend_cuda, "_binder", lambda device: partial(partial, launch_attend))
    monkeypatch.setattr(store_cuda, "load", lambda source, defines, device: Kernel(source, defines))


@pytest.fixture
def counted(monkeypatch):
    """How often each operation went the long way."""
    counts = {"store": 0, "attend": 0}
    for name, module in (("store", store_cuda), ("attend", attend_cuda)):
        run = module.run

        def counting(request, name=name, run=run):
            counts[name] += 1
            run(request)

        monkeypatch.setattr(module, "run", counting)
    return counts


def tables(tokens: int):
    """Lengths of two sequences of the same number of tokens; sequence b has blocks b, b + 2, ..."""
    return torch.full((2,), tokens, dtype=torch.int32)


TABLE = (torch.arange(3)[None, :] * 2 + torch.arange(2)[:, None]).to(torch.int32)
STARTS = torch.arange(3, dtype=torch.int32)


def slots(token: int) -> torch.Tensor:
    return (TABLE[:, token // 16].long() * 16) + token % 16


def vectors(seed: int, heads: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, heads, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_steps_give_what_single_calls_give(counted):
    codec, options = Codec(SPEC), ops.AttendOptions()
    pages, plain = (torch.zeros(BLOCKS, KV_HEADS, LAYOUT.page_bytes, dtype=torch.uint8) for _ in range(2))
    store, attend = RepeatedStore(LAYOUT), RepeatedAttend(LAYOUT)
    for token in range(20):
        key, value, query = (vectors(3 * token + i, n) for i, n in enumerate((KV_HEADS, KV_HEADS, HEADS)))
        store(key, value, pages, slots(token), codec=codec, backend="cuda")
        ops.store_kv(key, value, plain, slots(token), codec=codec, layout=LAYOUT, backend="reference")
        assert torch.equal(pages, plain)
        bounds = {"max_query_len": 1, "max_seq_len": token + 1}
        out = attend(
            query, pages, TABLE, tables(token + 1), STARTS, codec=codec, options=options, backend="cuda", **bounds
        )
        want = ops.attend(
            query, plain, TABLE, tables(token + 1), STARTS, codec=codec, layout=LAYOUT, options=options,
            backend="reference", **bounds,
        )  # fmt: skip
        assert torch.allclose(out, want, rtol=2e-3, atol=2e-3)
    assert counted == {"store": 1, "attend": 1}


@pytest.mark.parametrize("change", ["pages", "dtype", "strides", "rounding"])
def test_what_changes_is_noticed_by_store(counted, change):
    codec = Codec(SPEC)
    pages = torch.zeros(BLOCKS, KV_HEADS, LAYOUT.page_bytes, dtype=torch.uint8)
    store = RepeatedStore(LAYOUT)
    key, value = vectors(0, KV_HEADS), vectors(1, KV_HEADS)
    for token in range(2):
        store(key, value, pages, slots(token), codec=codec, backend="cuda")
    assert counted["store"] == 1
    query_aware = None
    if change == "pages":
        pages = torch.zeros_like(pages)
    elif change == "dtype":
        key = key.bfloat16()
    elif change == "strides":
        key = torch.zeros(4, KV_HEADS, 32)[::2].copy_(key)
    else:
        query_aware = torch.zeros(KV_HEADS, 32, 32, dtype=torch.int8)
    want = pages.clone()
    store(key, value, pages, slots(5), codec=codec, query_aware=query_aware, backend="cuda")
    ops.store_kv(key, value, want, slots(5), codec=codec, layout=LAYOUT, query_aware=query_aware, backend="reference")
    assert torch.equal(pages, want)
    assert counted["store"] == 2


@pytest.mark.parametrize("change", ["pages", "table", "options", "dtype", "queries"])
def test_what_changes_is_noticed_by_attend(counted, change):
    codec, options = Codec(SPEC), ops.AttendOptions()
    pages = torch.zeros(BLOCKS, KV_HEADS, LAYOUT.page_bytes, dtype=torch.uint8)
    for token in range(20):
        key, value = vectors(token, KV_HEADS), vectors(token + 50, KV_HEADS)
        ops.store_kv(key, value, pages, slots(token), codec=codec, layout=LAYOUT, backend="reference")
    attend = RepeatedAttend(LAYOUT)
    query, table, starts, most = vectors(99, HEADS), TABLE, STARTS, 1

    def call():
        return attend(
            query, pages, table, tables(20), starts, codec=codec, max_query_len=most, max_seq_len=20, options=options,
            backend="cuda",
        )  # fmt: skip

    call(), call()
    assert counted["attend"] == 1
    if change == "pages":
        pages = pages.flip(0).clone()
    elif change == "table":
        table = TABLE.flip(0).contiguous()
    elif change == "options":
        options = ops.AttendOptions(softmax_scale=0.7)
    elif change == "dtype":
        query = query.half()
    else:
        query, starts, most = torch.cat([query, query]), STARTS * 2, 2
    out = call()
    assert counted["attend"] == 2
    want = ops.attend(
        query, pages, table, tables(20), starts, codec=codec, layout=LAYOUT, max_query_len=most, max_seq_len=20,
        options=options, backend="reference",
    )  # fmt: skip
    assert torch.allclose(out.float(), want.float(), rtol=3e-3, atol=3e-3)


def test_pages_are_not_held_and_copies_start_anew():
    codec = Codec(SPEC)
    pages = torch.zeros(BLOCKS, KV_HEADS, LAYOUT.page_bytes, dtype=torch.uint8)
    store = RepeatedStore(LAYOUT)
    store(vectors(0, KV_HEADS), vectors(1, KV_HEADS), pages, slots(0), codec=codec, backend="cuda")
    assert copy.deepcopy(store)._last is None
    gone = ref(pages)
    del pages
    gc.collect()
    assert gone() is None
