"""store with query-aware rounding writes the codec's bytes in every implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store_cases import Case, build, expected, random_rounding, rows_on_boundaries

from slimkv import Codec, ops
from slimkv.errors import InputError

TINY = Case(heads=2, tokens=40)
COVERING = [
    *(replace(TINY, format=f"k{bits}v3", tokens=20) for bits in (1, 2, 3, 4, 5)),
    replace(TINY, format="kl8v4", tokens=20),
    replace(TINY, dim=16, tokens=600, slots="aligned"),
    replace(TINY, dim=80, heads=1, slots="aligned"),
    replace(TINY, dim=128, heads=1, tokens=17, format="k3v3"),
    replace(TINY, dim=96, value_dim=48, heads=1, tokens=17, strided=True),
    replace(TINY, policy="unbiased", dtype="fp32", tokens=20),
]
FULL = [
    *(replace(TINY, format=f"kl{b}v4", dim=dim, tokens=n) for b in range(1, 9) for dim in (64, 128) for n in (5, 700)),
    *(replace(TINY, dim=dim, slots=s) for dim in (80, 112, 192, 256, 576, 1024) for s in ("aligned", "scattered")),
    *(replace(TINY, policy=policy, format=word) for policy in ("plain", "unbiased") for word in ("k3v3", "k6v2")),
    replace(TINY, dim=128, heads=8, tokens=8192, slots="aligned", page=64),
]  # fmt: skip


def check(case: Case, device: torch.device, impl: str) -> None:
    key, value, slots, pages, codec = build(case, device)
    rounding = random_rounding(case.heads, codec)
    want = expected(key, value, slots, pages, codec, case.layout, rounding)
    plain = expected(key, value, slots, pages, codec, case.layout)
    assert not torch.equal(want, plain)
    ops.store(key, value, pages, slots, codec=codec, layout=case.layout, rounding=rounding, impl=impl)
    wrong = int((pages != want).sum())
    assert not wrong, f"{wrong} of {want.numel()} bytes differ"


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, id=str(c)) for c in COVERING),
        *(pytest.param(c, id=str(c), marks=pytest.mark.full) for c in FULL),
    ],
)
def test_bytes_are_the_codecs(case, device):
    check(case, device, "triton")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("word", ["k4v4", "k5v5", "k3v8"])
def test_other_implementations_write_the_same(word, impl, device):
    check(replace(TINY, format=word, dtype="fp32"), torch.device("cpu") if impl == "cpu" else device, impl)


def test_ties(device):
    """Coordinates on a boundary, or one rounding beside it, with corrections of zero: the lower level, as ever."""
    case = Case(heads=1)
    codec = Codec(case.layout.spec, device)
    rows, exact = rows_on_boundaries(codec)
    assert exact >= 3
    key, slots = rows[:, None, :].to(device), torch.arange(len(rows), device=device)
    shape = (case.layout.blocks_for(len(rows)), 1, case.layout.region_bytes)
    for rounding in (torch.zeros(1, 64, 64, dtype=torch.int8, device=device), random_rounding(1, codec)):
        pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        want = expected(key, key, slots, pages, codec, case.layout, rounding)
        ops.store(key, key, pages, slots, codec=codec, layout=case.layout, rounding=rounding, impl="triton")
        assert torch.equal(pages, want)


def test_what_lies_below_the_diagonal_is_not_used(device):
    key, value, slots, pages, codec = build(TINY, device)
    rounding = random_rounding(TINY.heads, codec)
    want = expected(key, value, slots, pages, codec, TINY.layout, rounding)
    dirty = rounding + torch.full_like(rounding, 55).tril()
    ops.store(key, value, pages, slots, codec=codec, layout=TINY.layout, rounding=dirty, impl="triton")
    assert torch.equal(pages, want)


def test_a_token_that_cannot_be_encoded_touches_no_other(device):
    case = Case(heads=1, tokens=32, slots="aligned", dtype="fp32")
    _, _, slots, pages, codec = build(case, device)
    key, value = torch.randn(2, case.tokens, 1, case.dim, generator=torch.Generator().manual_seed(0)).to(device)
    key[3, 0, 5], key[9, 0, 0] = torch.nan, torch.inf
    rounding = random_rounding(1, codec)
    want = expected(key, value, slots, pages, codec, case.layout, rounding)
    ops.store(key, value, pages, slots, codec=codec, layout=case.layout, rounding=rounding, impl="triton")
    assert torch.equal(pages, want)


@pytest.mark.parametrize(
    ("word", "rounding", "message"),
    [
        ("k8v4", torch.zeros(2, 64, 64, dtype=torch.int8), "for lloyd keys; these are fp8: pass rounding=None"),
        ("ku4v4", torch.zeros(2, 64, 64, dtype=torch.int8), "these are u4"),
        ("k4v4", torch.zeros(2, 64, 64), r"must be int8 \[2, 64, 64\] on cpu, not torch.float32"),
        ("k4v4", torch.zeros(64, 64, dtype=torch.int8), r"not torch.int8 \[64, 64\]"),
        ("k4v4", torch.zeros(2, 64, 64, dtype=torch.int8).mT, "contiguous"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(word, rounding, message):
    case = replace(TINY, format=word)
    key, value, slots, pages, codec = build(case, torch.device("cpu"))
    with pytest.raises(InputError, match=message):
        ops.store(key, value, pages, slots, codec=codec, layout=case.layout, rounding=rounding)
