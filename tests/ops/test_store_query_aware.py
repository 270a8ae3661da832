"""``store_kv`` with query-aware rounding writes the codec's bytes with every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store_cases import Case, build, expected, random_query_aware, rows_on_boundaries

from slimkv import Codec, ops
from slimkv.errors import InputError
from slimkv.ops import PackedKV, Rounding
from tail import sample

TINY = Case(heads=2, tokens=40)
COVERING = [
    *(replace(TINY, format=f"k{bits}v3", tokens=20) for bits in (1, 2, 3, 4, 5)),
    replace(TINY, format="k8v4", tokens=20),
    replace(TINY, dim=16, tokens=600, slots="aligned"),
    replace(TINY, dim=80, heads=1, slots="aligned"),
    replace(TINY, dim=128, heads=1, tokens=17, format="k3v3"),
    replace(TINY, dim=96, value_dim=48, heads=1, tokens=17, strided=True),
    replace(TINY, dtype="fp32", tokens=20),
]
FULL = [
    *(replace(TINY, format=f"k{b}v4", dim=dim, tokens=n) for b in range(1, 9) for dim in (64, 128) for n in (5, 700)),
    *(replace(TINY, dim=dim, slots=s) for dim in (80, 112, 192, 256, 576, 1024) for s in ("aligned", "scattered")),
    *(replace(TINY, format=format) for format in ("k3v3", "k6v2")),
    replace(TINY, dim=128, heads=8, tokens=8192, slots="aligned", page=64),
]  # fmt: skip


def check(case: Case, device: torch.device, backend: str) -> None:
    key, value, slots, pages, codec = build(case, device)
    query_aware = random_query_aware(case.heads, codec)
    want = expected(key, value, slots, pages, codec, case.layout, query_aware)
    plain = expected(key, value, slots, pages, codec, case.layout)
    assert not torch.equal(want, plain)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, Rounding(query_aware), backend=backend)
    wrong = int((pages != want).sum())
    assert not wrong, f"{wrong} of {want.numel()} bytes differ"


@pytest.mark.parametrize(
    "case",
    [
        *sample((pytest.param(c, id=str(c)) for c in COVERING), 4),
        *(pytest.param(c, id=str(c), marks=pytest.mark.full) for c in FULL),
    ],
)
def test_bytes_are_the_codecs(case, device):
    check(case, device, "triton")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("format", ["k4v4", "k5v5", "k3v8"])
def test_other_implementations_write_the_same(format, backend, device):
    check(replace(TINY, format=format, dtype="fp32"), torch.device("cpu") if backend == "cpu" else device, backend)


def test_ties(device):
    """Coordinates on a boundary or just beside it. Without corrections, a tie takes the lower level as usual."""
    case = Case(heads=1)
    codec = Codec(case.layout.spec, device)
    rows, exact = rows_on_boundaries(codec, 1)
    assert exact >= 3
    key, slots = rows[:, None, :].to(device), torch.arange(len(rows), device=device)
    shape = (case.layout.blocks_for(len(rows)), 1, case.layout.page_bytes)
    for query_aware in (torch.zeros(1, 64, 64, dtype=torch.int8, device=device), random_query_aware(1, codec)):
        pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        want = expected(key, key, slots, pages, codec, case.layout, query_aware)
        ops.store_kv(key, key, PackedKV(pages, codec, case.layout), slots, Rounding(query_aware), backend="triton")
        assert torch.equal(pages, want)


def test_what_lies_below_the_diagonal_is_not_used(device):
    case = replace(TINY, tokens=8)
    key, value, slots, pages, codec = build(case, device)
    query_aware = random_query_aware(case.heads, codec)
    want = expected(key, value, slots, pages, codec, case.layout, query_aware)
    dirty = query_aware + torch.full_like(query_aware, 55).tril()
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, Rounding(dirty), backend="triton")
    assert torch.equal(pages, want)


def test_a_token_that_cannot_be_encoded_touches_no_other(device):
    case = Case(heads=1, tokens=32, slots="aligned", dtype="fp32")
    _, _, slots, pages, codec = build(case, device)
    key, value = torch.randn(2, case.tokens, 1, case.dim, generator=torch.Generator().manual_seed(0)).to(device)
    key[3, 0, 5], key[9, 0, 0] = torch.nan, torch.inf
    query_aware = random_query_aware(1, codec)
    want = expected(key, value, slots, pages, codec, case.layout, query_aware)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, Rounding(query_aware), backend="triton")
    assert torch.equal(pages, want)


@pytest.mark.parametrize(
    ("format", "query_aware", "message"),
    [
        (
            "turboquant_k8v4",
            torch.zeros(2, 64, 64, dtype=torch.int8),
            "needs Lloyd-Max keys; the key format is fp8: pass rounding=None",
        ),
        ("ku4v4", torch.zeros(2, 64, 64, dtype=torch.int8), "the key format is u4"),
        ("k4v4", torch.zeros(2, 64, 64), r"must be int8 \[2, 64, 64\], or several of them, on cpu, not torch.float32"),
        ("k4v4", torch.zeros(64, 64, dtype=torch.int8), r"not torch.int8 \[64, 64\]"),
        ("k4v4", torch.zeros(2, 64, 64, dtype=torch.int8).mT, "contiguous"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(format, query_aware, message):
    case = replace(TINY, format=format)
    key, value, slots, pages, codec = build(case, torch.device("cpu"))
    with pytest.raises(InputError, match=message):
        ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, Rounding(query_aware))


def test_everything_under_inference_mode():
    """As in engines. The matrices, too, are then tensors without version counters."""
    with torch.inference_mode():
        key, value, slots, pages, codec = build(TINY, torch.device("cpu"))
        query_aware = random_query_aware(TINY.heads, codec)
        assert query_aware.is_inference()
        want = expected(key, value, slots, pages, codec, TINY.layout, query_aware)
        for backend in ("cpu", "reference"):
            written = pages.clone()
            kv = PackedKV(written, codec, TINY.layout)
            ops.store_kv(key, value, kv, slots, Rounding(query_aware), backend=backend)
            assert torch.equal(written, want), backend
