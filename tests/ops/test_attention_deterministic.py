"""Deterministic attention: a query gets the same bits in any batch and with any division of a prompt into chunks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV
from tail import sample

KV_HEADS, GROUP, DIM, PAGE = 2, 3, 32, 16
LENGTHS = (1100, 530, 70, 1)  # more than two parts of 512 keys, more than one, less than one; a single token


@dataclass(frozen=True)
class Variant:
    """The attention settings of a model."""

    format: str = "k4v4"
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    offset: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return "-".join(f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(Variant, k)) or "plain"


VARIANTS = [
    Variant(), Variant("raw"), Variant("k8v5"), Variant("fp8"), Variant("ku4vu4"), Variant(window=37),
    Variant("k3v2", dtype=torch.bfloat16), Variant("raw", window=37), Variant("k8v5", window=600),
    Variant("ku4vu4", window=41, sinks=True), Variant(softcap=5.0, offset=True), Variant(sinks=True, offset=True),
    Variant("fp8", window=90, sinks=True, offset=True),
]  # fmt: skip


class Cache:
    """Sequences in pages, each with a query for every token."""

    def __init__(self, variant: Variant, lengths: tuple[int, ...] = LENGTHS) -> None:
        draw = torch.Generator().manual_seed(1)
        self.lengths = lengths
        spec = CodecSpec.parse(variant.format, DIM)
        layout = PageLayout(spec, PAGE)
        blocks = [-(-length // PAGE) for length in lengths]
        scattered = torch.randperm(sum(blocks), generator=draw).to(torch.int32)
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for i, count in enumerate(blocks):
            self.table[i, :count] = scattered[sum(blocks[:i]) :][:count]
        pages = torch.zeros(sum(blocks), KV_HEADS, layout.page_bytes, dtype=torch.uint8)
        offset = torch.randn(KV_HEADS, DIM, generator=draw).bfloat16() if variant.offset else None
        self.kv = PackedKV(pages, Codec(spec, torch.device("cpu")), layout, offset)
        dtype = getattr(torch, spec.key.raw_dtype) if variant.format == "raw" else variant.dtype
        self.queries = []
        for i, length in enumerate(lengths):
            at = torch.arange(length)
            slots = self.table[i, at // PAGE].long() * PAGE + at % PAGE
            key, value = (torch.randn(length, KV_HEADS, DIM, generator=draw).to(dtype) for _ in range(2))
            ops.store_kv(key, value, self.kv, slots, backend="reference")
            self.queries.append(torch.randn(length, KV_HEADS * GROUP, DIM, generator=draw).to(variant.dtype))
        sinks = torch.randn(KV_HEADS * GROUP, generator=draw) if variant.sinks else None
        self.options = AttendOptions(
            sliding_window=variant.window, softcap=variant.softcap, sinks=sinks, deterministic=True
        )

    def attend(self, calls: list[tuple[int, int, int]], backend: str) -> list[torch.Tensor]:
        """Attends in one call: (sequence, first query, end) each -> output and log-sum-exp of each, concatenated."""
        counts = [end - first for _, first, end in calls]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([end for _, _, end in calls], dtype=torch.int32)
        query = torch.cat([self.queries[i][first:end] for i, first, end in calls])
        table = self.table[[i for i, _, _ in calls]]
        batch = AttentionBatch(table, lens, starts, max(counts), int(lens.max()))
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        out = ops.attend(query, self.kv, batch, self.options, lse=lse, backend=backend)
        return list(torch.cat([out.float(), lse[..., None]], -1).split(counts))


def check(cache: Cache, backend: str, last: int) -> None:
    """Compares the last queries of every sequence: one by one, at the end of a prefill, in chunks, and in a batch."""
    for i, length in enumerate(cache.lengths):
        first = max(0, length - last)
        singly = torch.cat([cache.attend([(i, p, p + 1)], backend)[0] for p in range(first, length)])
        assert singly.isfinite().all()
        whole = cache.attend([(i, 0, length)], backend)[0][first:]
        few = torch.cat([cache.attend([(i, p, min(p + 7, length))], backend)[0] for p in range(first, length, 7)])
        others = [(j, max(0, n - 5 * j - 1), n) for j, n in enumerate(cache.lengths) if j != i]
        crowded = cache.attend([*others, (i, first, length), *others], backend)[len(others)]
        assert torch.equal(whole, singly)
        assert torch.equal(few, singly)
        assert torch.equal(crowded, singly)


@pytest.mark.parametrize("variant", sample(VARIANTS, 3), ids=str)
def test_a_query_gets_one_result_however_it_is_asked(variant):
    check(Cache(variant), "cpu", 20)


@pytest.mark.parametrize(
    "variant", sample([Variant(sinks=True, offset=True), Variant(), Variant("raw", window=37)], 3), ids=str
)
def test_the_reference_does_so_too(variant):
    check(Cache(variant, (90, 33)), "reference", 12)


@pytest.mark.parametrize("variant", sample(VARIANTS, 3), ids=str)
def test_it_is_attention(variant):
    cache = Cache(variant, (600, 45))
    calls = [(0, 560, 600), (1, 0, 45)]
    for ours, reference in zip(cache.attend(calls, "cpu"), cache.attend(calls, "reference"), strict=True):
        # Probabilities are rounded to 23 bits if codes are bytes, and sums of 600 terms have another order.
        torch.testing.assert_close(ours, reference, rtol=2e-2 if variant.dtype == torch.bfloat16 else 1e-4, atol=2e-5)


def test_what_cannot_be_deterministic_is_refused_by_name():
    with pytest.raises(InputError, match="deterministic attention takes prefill='16bit', not '8bit'"):
        AttendOptions(deterministic=True, prefill="8bit")
    cache = Cache(Variant(), (20,))
    starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20], [20]))
    arguments = cache.queries[0], cache.kv, AttentionBatch(cache.table, lens, starts, 20, 20), cache.options
    fresh = torch.randn(20, KV_HEADS, DIM)
    with pytest.raises(InputError, match="leave fresh at None"):
        ops.attend(*arguments, fresh=(fresh, fresh))
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="deterministic"):
        ops.attend(*arguments, backend="triton")
