"""Planned calls give the results of single calls, and report which calls they fit."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import ref

import host
import pytest
import torch
from test_decode_cuda import SMALL_GPU
from test_decode_cuda import launch as launch_attend

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.cache import PagedPool
from slimkv.errors import InputError
from slimkv.ops import AttentionBatch, PackedKV, Rounding
from slimkv.ops.attention.api import REGISTRY as ATTEND
from slimkv.ops.attention.cuda import decode as attend_cuda
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
    """Counts the calls of each operation without a plan."""
    counts = {"store": 0, "attend": 0}
    for name, module in (("store", store_cuda), ("attend", attend_cuda)):
        run = module.run

        def counting(request, name=name, run=run):
            counts[name] += 1
            run(request)

        monkeypatch.setattr(module, "run", counting)
    return counts


def tables(tokens: int):
    """The lengths of two sequences, both ``tokens``; sequence b has blocks b, b + 2, ..."""
    return torch.full((2,), tokens, dtype=torch.int32)


TABLE = (torch.arange(3)[None, :] * 2 + torch.arange(2)[:, None]).to(torch.int32)
STARTS = torch.arange(3, dtype=torch.int32)


def slots(token: int) -> torch.Tensor:
    return (TABLE[:, token // 16].long() * 16) + token % 16


def vectors(seed: int, heads: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, heads, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_pages() -> torch.Tensor:
    return torch.zeros(BLOCKS, KV_HEADS, LAYOUT.page_bytes, dtype=torch.uint8)


def store_plan(key, value, pages, codec, query_aware=None):
    rounding = None if query_aware is None else Rounding(query_aware)
    return ops.plan_store(key, value, PackedKV(pages, codec, LAYOUT), slots(0), rounding, backend="cuda")


def batch(tokens: int) -> AttentionBatch:
    return AttentionBatch(TABLE, tables(tokens), STARTS, 1, tokens)


def attend_plan(query, pages, codec, options=None, backend="cuda"):
    return ops.plan_attend(query, PackedKV(pages, codec, LAYOUT), batch(1), options, backend=backend)


def test_steps_give_what_single_calls_give(counted):
    codec, options = Codec(SPEC), ops.AttendOptions()
    pages, plain = new_pages(), new_pages()
    store = store_plan(vectors(0, KV_HEADS), vectors(1, KV_HEADS), pages, codec)
    attend = attend_plan(vectors(2, HEADS), pages, codec, options)
    for token in range(20):
        key, value, query = (vectors(3 * token + i, n) for i, n in enumerate((KV_HEADS, KV_HEADS, HEADS)))
        store.run(key, value, slots(token))
        ops.store_kv(key, value, PackedKV(plain, codec, LAYOUT), slots(token), backend="reference")
        assert torch.equal(pages, plain)
        out = attend.run(query, tables(token + 1))
        want = ops.attend(query, PackedKV(plain, codec, LAYOUT), batch(token + 1), options, backend="reference")
        assert torch.allclose(out, want, rtol=2e-3, atol=2e-3)
    assert counted == {"store": 0, "attend": 0}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends_that_prepare_nothing_can_be_planned_too(backend):
    codec, pages, query = Codec(SPEC), new_pages(), vectors(2, HEADS)
    key, value = vectors(0, KV_HEADS), vectors(1, KV_HEADS)
    plan = ops.plan_store(key, value, PackedKV(pages, codec, LAYOUT), slots(0), backend=backend)
    plan.run(value, key, slots(1))
    plan.run(key, value, slots(0))
    want = ops.attend(query, PackedKV(pages, codec, LAYOUT), batch(2), backend="reference")
    out = torch.full_like(want, torch.nan)
    assert attend_plan(query, pages, codec, backend=backend).run(query, tables(2), out) is out
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change", ["nothing", "pages", "dtype", "strides", "key_offset", "query_aware", "tokens", "slots"]
)
def test_a_store_plan_says_what_it_fits(change):
    codec, pages, query_aware, slot = Codec(SPEC), new_pages(), None, slots(5)
    offset = None
    key, value = vectors(0, KV_HEADS), vectors(1, KV_HEADS)
    plan = store_plan(key, value, pages, codec)
    if change == "pages":
        pages = new_pages()
    elif change == "dtype":
        key = key.bfloat16()
    elif change == "strides":
        key = torch.zeros(4, KV_HEADS, 32)[::2].copy_(key)
    elif change == "key_offset":
        offset = torch.zeros(KV_HEADS, 32, dtype=torch.bfloat16)
    elif change == "query_aware":
        query_aware = torch.zeros(KV_HEADS, 32, 32, dtype=torch.int8)
    elif change == "tokens":
        key, value, slot = key[:1], value[:1], slot[:1]
    elif change == "slots":
        slot = torch.zeros(2 * len(slot), dtype=slot.dtype)[::2]
    kv, rounding = PackedKV(pages, codec, LAYOUT, offset), None if query_aware is None else Rounding(query_aware)
    assert plan.fits(key, value, kv, slot, rounding) == (change == "nothing")
    if change in ("dtype", "strides", "tokens", "slots"):
        with pytest.raises(InputError, match=f"the plan takes {'slot_mapping' if change == 'slots' else 'key'} like"):
            plan.run(key, value, slot)


@pytest.mark.parametrize("change", ["nothing", "pages", "table", "options", "dtype", "queries"])
def test_an_attend_plan_says_what_it_fits(change):
    codec, options, pages = Codec(SPEC), ops.AttendOptions(), new_pages()
    query, table, starts = vectors(99, HEADS), TABLE, STARTS
    plan = attend_plan(query, pages, codec, options)
    if change == "pages":
        pages = pages.clone()
    elif change == "table":
        table = TABLE.clone()
    elif change == "options":
        options = ops.AttendOptions(softmax_scale=0.7)
    elif change == "dtype":
        query = query.half()
    elif change == "queries":
        query, starts = torch.cat([query, query]), STARTS * 2
    step = replace(batch(1), block_table=table, cu_seqlens_q=starts)
    assert plan.fits(query, PackedKV(pages, codec, LAYOUT), step, options) == (change == "nothing")
    if change in ("dtype", "queries"):
        with pytest.raises(InputError, match="the plan takes query like"):
            plan.run(query, tables(20))


def test_lengths_and_outputs_that_a_plan_cannot_take():
    codec, query = Codec(SPEC), vectors(2, HEADS)
    plan = attend_plan(query, new_pages(), codec)
    with pytest.raises(InputError, match=r"the plan takes seq_lens like torch.int32 \[2\] .* not torch.int64 \[2\]"):
        plan.run(query, tables(1).long())
    with pytest.raises(InputError, match=r"with strides \[2\]"):
        plan.run(query, torch.ones(4, dtype=torch.int32)[::2])
    with pytest.raises(InputError, match="the plan takes out like"):
        plan.run(query, tables(1), torch.empty(2, HEADS, 32, dtype=torch.float16))


def test_plans_hold_no_step_and_pools_drop_them_when_pages_move():
    codec, query = Codec(SPEC), vectors(2, HEADS)
    plan = attend_plan(query, new_pages(), codec)
    gone = ref(query)
    del query
    gc.collect()
    assert gone() is None
    assert plan is not None
    pool = PagedPool(SPEC, 2, KV_HEADS, 16)
    key = vectors(0, KV_HEADS)
    pool.store(key, key, torch.tensor([0, 1]))
    old = ref(pool.pages)
    copied = copy.deepcopy(pool)
    pool.grow(4)
    gc.collect()
    assert old() is None
    copied.store(key, key, torch.tensor([16, 17]))
    assert not torch.equal(copied.pages, pool.pages[:2])
