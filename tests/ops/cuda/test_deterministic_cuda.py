"""Deterministic attention in CUDA: a row's bits depend neither on the batch, nor on chunks, nor on the GPU."""

from __future__ import annotations

from dataclasses import replace

import host
import pytest
import torch
from test_decode_cuda import H200, SMALL_GPU
from test_decode_cuda import launch as launch_decode
from test_prefill_cuda import launch as launch_prefill

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.ops import AttentionBatch, PackedKV
from slimkv.ops.attention import reference
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendRequest, checked_request
from slimkv.ops.attention.cuda import decode, decode_config, prefill, prefill_config
from slimkv.ops.attention.cuda.decode_config import (
    DecodeConfig,
    bound_of,
    deterministic_config,
    reachable,
)
from tail import sample

pytestmark = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU, PAGE = torch.device("cpu"), 16
LENGTHS = (258, 131, 60, 1)
LARGER_GPU = replace(SMALL_GPU, multiprocessors=7)


class Cache:
    """Sequences in pages with token scales that differ by many powers of two, and a query for every token."""

    def __init__(
        self, format="k4v4", dim=64, group=4, lengths=LENGTHS, sinks=False, quiet=None, **options
    ) -> None:  # fmt: skip
        """``quiet``: tokens 2^16 smaller than the others; without it, norms are log-normal."""
        g = torch.Generator().manual_seed(5)
        spec, kv_heads = CodecSpec.parse(format, dim), 2
        codec, layout = Codec(spec, CPU), PageLayout(spec, PAGE)
        blocks = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(blocks), generator=g).to(torch.int32)
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        pages = torch.zeros(sum(blocks), kv_heads, layout.page_bytes, dtype=torch.uint8)
        self.kv = PackedKV(pages, codec, layout)
        self.queries = []
        for i, length in enumerate(lengths):
            self.table[i, : blocks[i]] = order[sum(blocks[:i]) :][: blocks[i]]
            slots = self.table[i].long().repeat_interleave(PAGE)[:length] * PAGE + torch.arange(length) % PAGE
            key, value = (
                torch.randn(length, kv_heads, dim, generator=g)
                * (
                    torch.exp(spread * torch.randn(length, 1, 1, generator=g))
                    if quiet is None
                    else torch.tensor([2.0**-16 if i in quiet else 1.0 for i in range(length)])[:, None, None]
                )
                for spread in (0.7, 2.0)
            )
            ops.store_kv(key, value, self.kv, slots, backend="reference")
            self.queries.append(torch.randn(length, kv_heads * group, dim, generator=g))
        self.options = ops.AttendOptions(
            sinks=torch.randn(kv_heads * group, generator=g) if sinks else None, deterministic=True, **options
        )

    def request(self, calls, prompt: bool | None) -> AttendRequest:
        """One request of all ``calls``, each a (sequence, first query, end)."""
        counts, lens = [end - first for _, first, end in calls], [end for _, _, end in calls]
        query = torch.cat([self.queries[i][first:end] for i, first, end in calls])
        batch = AttentionBatch(
            self.table[[i for i, _, _ in calls]], torch.tensor(lens, dtype=torch.int32),
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32), max(counts), max(lens),
        )  # fmt: skip
        options = replace(self.options, prompt=prompt)
        return checked_request(query, self.kv, batch, options, lse=torch.empty(query.shape[:2]))

    def generated(self, *calls, gpu=SMALL_GPU) -> list[torch.Tensor]:
        """The output and log-sum-exp of each call, concatenated."""
        request = self.request(calls, False)
        assert prefill_config.most_packed_queries(request) == request.max_query_len
        decode.attend_packed(request, gpu, launch_decode, request.max_query_len)
        return rows_of(request, calls)

    def prompts(self, *calls, budget=prefill.WORKSPACE_BYTES) -> list[torch.Tensor]:
        request = self.request(calls, True)
        assert prefill_config.most_packed_queries(request) == 0
        prefill.attend_prefill(request, launch_prefill, budget, most_queries=0)
        return rows_of(request, calls)

    def exact(self, *calls) -> list[torch.Tensor]:
        request = self.request(calls, None)
        reference.run(replace(request, options=replace(request.options, deterministic=False)))
        return rows_of(request, calls)


def rows_of(request, calls) -> list[torch.Tensor]:
    assert request.lse is not None
    return list(torch.cat([request.out, request.lse[..., None]], -1).split([end - first for _, first, end in calls]))


def is_exact(cache: Cache) -> bool:
    """Whether tokens around the end of a split get equal bits singly, in pairs, at once, in a batch, on other GPUs."""
    others, found = [(2, 59, 60), (3, 0, 1)], []
    for sequence, length in ((0, 258), (1, 131)):
        first = length - 4
        singly = torch.cat([cache.generated((sequence, p, p + 1))[0] for p in range(first, length)])
        pairs = torch.cat([cache.generated((sequence, p, p + 2))[0] for p in (first, first + 2)])
        at_once = cache.generated((sequence, first, length), gpu=LARGER_GPU)[0]
        crowded = cache.generated(*others, (sequence, first, length), (1, 125, 129))[2]
        alone = cache.generated((sequence, length - 1, length), gpu=LARGER_GPU)[0]
        want = cache.exact((sequence, first, length))[0]
        assert ((singly - want).norm(dim=-1) / want.norm(dim=-1)).max() < 5e-3
        found += [torch.equal(x, singly) for x in (pairs, at_once, crowded)] + [torch.equal(alone, singly[-1:])]
    return all(found)


@pytest.fixture
def short_splits(monkeypatch):
    """Shortens splits, so that sequences of an emulated cache have several."""
    for module in (decode, decode_config):
        monkeypatch.setattr(module, "SPLIT_TOKENS", 128)


CASES = [
    {}, {"format": "k5v5", "sinks": True}, {"format": "ku4vur8", "group": 8}, {"sliding_window": 130, "softcap": 3.0},
    {"sliding_window": 50, "group": 6, "dim": 80},
]  # fmt: skip


@pytest.mark.parametrize("case", sample(CASES, 3), ids=str)
def test_a_generated_token_gets_one_result(case, short_splits):
    assert is_exact(Cache(**case))


def test_the_grid_must_not_reach_the_splits(short_splits, monkeypatch):
    """The test above would fail if splits depended on the device."""
    prepare = decode._prepare

    def by_grid(request, device, most_queries):
        call = prepare(request, device, most_queries)
        call.args.split_steps, call.args.max_splits = 1 if device is LARGER_GPU else 2, 8
        return replace(call, part_bytes=1 << 22, workspace_bytes=1 << 23)

    monkeypatch.setattr(decode, "_prepare", by_grid)
    assert not is_exact(Cache())


def test_nor_the_default_partition(short_splits, monkeypatch):
    prepare = decode._prepare

    def default(request, device, most_queries):
        return prepare(replace(request, options=replace(request.options, deterministic=False)), device, most_queries)

    monkeypatch.setattr(decode, "_prepare", default)
    assert not is_exact(Cache())


@pytest.mark.parametrize("lengths", [(100, 60, 3), (100, 0, 3)])
def test_short_sequences_take_one_launch(lengths):
    cache, names = Cache(lengths=tuple(max(1, n) for n in lengths)), []
    request = cache.request([(i, max(0, n - 1), n) for i, n in enumerate(lengths)], False)
    decode.attend_packed(request, SMALL_GPU, lambda call: names.append(call.name), 1)
    assert names == ["attend"]


PROMPTS = [
    {"group": 2}, {"dim": 80, "format": "ku4v8", "softcap": 3.0}, {"sliding_window": 70, "group": 3, "sinks": True},
]  # fmt: skip


@pytest.mark.parametrize("case", sample(PROMPTS, 3), ids=str)
def test_a_row_of_a_prompt_gets_one_result(case):
    """A prompt in one chunk, in chunks of any size, after a cached prefix, in a batch, and in several passes."""
    cache, first, length = Cache(**case, lengths=(140, 170, 1)), 100, 170
    whole, want = cache.prompts((1, first, length))[0], cache.exact((1, first, length))[0]
    # Keys are long; the default kernel's errors are as large.
    assert ((whole - want).norm(dim=-1) / want.norm(dim=-1)).max() < 1e-2
    for chunk in (24, 41):  # the tile of token 127 is complete in some calls only
        cut = [cache.prompts((1, at, min(at + chunk, length)))[0] for at in range(first, length, chunk)]
        assert torch.equal(torch.cat(cut), whole)
    crowded = cache.prompts((0, 130, 140), (1, first, 129), (2, 0, 1))
    assert torch.equal(crowded[1], whole[: 129 - first])
    for at in (first, length - 1):
        assert torch.equal(cache.prompts((1, at, length), budget=1)[0], whole[at - first :])


def with_single_warps(request) -> prefill.PrefillConfig:
    return replace(prefill_config.warp_config(request.layout.spec, SMALL_GPU), by_row=True)


@pytest.mark.parametrize("single_warps", [False, True])
@pytest.mark.parametrize(
    "case",
    sample(
        [
            {"format": "k8v8", "group": 2, "sinks": True, "sliding_window": 100}, {"group": 1},
            {"format": "ku4vu4", "group": 3, "dim": 96, "softcap": 20.0},
            {"dim": 128, "group": 1, "sliding_window": 33},
        ],
        4,
    ),
    ids=str,
)  # fmt: skip
def test_chunks_of_any_size_of_tokens_far_apart(case, single_warps, monkeypatch):
    """Scales 2^16 apart in a tile: tokens that a row does not see must not affect the rounding of others."""
    if single_warps:
        monkeypatch.setattr(prefill, "config_for", with_single_warps)
    length = 260
    cache = Cache(**case, lengths=(length,), quiet=range(20 if "sliding_window" in case else 0, 245))
    whole = cache.prompts((0, 0, length))[0]
    for chunk, begin in ((100, 0), (33, 161), (17, 226), (1, 256)):
        cut = [cache.prompts((0, at, min(at + chunk, length)))[0] for at in range(begin, length, chunk)]
        assert torch.equal(torch.cat(cut), whole[begin:]), chunk


def test_the_order_of_tiles_and_their_units_must_not_reach_a_row(monkeypatch):
    """The test above would fail with the default kernel."""
    cache = Cache(group=2, lengths=(1, 170))
    config = prefill_config.configs(cache.kv.layout.spec, prefill_config.FIRST)[0]
    monkeypatch.setattr(prefill, "config_for", lambda request: config)
    assert not torch.equal(cache.prompts((1, 100, 129))[0], cache.prompts((1, 100, 170))[0][:29])


@pytest.mark.parametrize(
    ("format", "dim", "group", "queries", "config"),
    [
        ("k4v4", 128, 4, 1, DecodeConfig(4, 64, 8, 2, bulk=True, exact=True)),
        ("k4v4", 128, 4, 8, DecodeConfig(16, 64, 8, 2, bulk=True, exact=True, narrow=True)),
        ("k4v4", 128, 8, 4, DecodeConfig(16, 64, 8, 2, bulk=True, exact=True)),
        ("k4v4", 64, 4, 2, DecodeConfig(8, 128, 12, 2, bulk=True, exact=True, narrow=True)),
        ("k4v4", 256, 6, 2, DecodeConfig(8, 32, 8, 2, exact=True)),
    ],
)
def test_more_queries_take_the_arithmetic_of_one(format, dim, group, queries, config):
    layout = PageLayout(CodecSpec.parse(format, dim), 64)
    found = deterministic_config(H200, layout, group, queries)
    assert found == config
    one = deterministic_config(H200, layout, group, 1)
    assert one is not None
    assert (one.block_tokens, one.warps) == (config.block_tokens, config.warps)
    assert config in reachable(H200, layout, group, MAX_DECODE_QUERIES, deterministic=True)


def test_a_layers_window_decides_the_configuration():
    layout, window = PageLayout(CodecSpec.parse("k4v4", 64), 64), 128
    found = deterministic_config(H200, layout, 8, 1, bound_of(layout, window))
    assert found == DecodeConfig(8, 32, 4, 1, 4, exact=True)
    assert found in reachable(H200, layout, 8, MAX_DECODE_QUERIES, window, deterministic=True)
    assert found not in reachable(H200, layout, 8, MAX_DECODE_QUERIES, deterministic=True)


def test_more_than_16_query_heads_are_refused():
    assert deterministic_config(H200, PageLayout(CodecSpec.parse("k4v4", 128), 64), 20, 1) is None
