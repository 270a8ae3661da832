"""``store_kv`` with several query-aware matrices: every token's bytes are those of its own matrix alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store_cases import Case, build, expected, random_query_aware

from slimkv import ops
from slimkv.errors import InputError
from slimkv.ops import PackedKV, Rounding

TINY = Case(heads=2, tokens=40)
CASES = [replace(TINY, heads=1, slots="aligned"), replace(TINY, format="k5v3", dim=80, dtype="fp32", tokens=20)]
INDEX = {
    "mixed": lambda n: torch.arange(n) * 7 % 3,
    "one": lambda n: torch.full((n,), 2),
    "sorted": lambda n: torch.arange(n) * 3 // n,
    "beyond": lambda n: torch.arange(n) % 9 - 3,  # clamped to the first and the last
}


def several(case: Case, codec, count: int = 3):
    matrices = [random_query_aware(case.heads, codec).roll(i, 0) * (i + 1) // count for i in range(count)]
    return torch.stack(matrices).to(torch.int8).contiguous()


def with_each(case: Case, key, value, slots, pages, codec, matrices, index):
    """The expected pages: for each matrix, the codec's bytes of the tokens that use it."""
    want = pages.clone()
    for number in range(len(matrices)):
        mine = torch.where(index.clamp(0, len(matrices) - 1) == number, slots, -1)
        want = expected(key, value, mine, want, codec, case.layout, matrices[number])
    return want


def check(case: Case, kind: str, backend: str, device: torch.device) -> None:
    key, value, slots, pages, codec = build(case, device)
    matrices = several(case, codec)
    index = INDEX[kind](case.tokens).to(torch.int32).to(device)
    want = with_each(case, key, value, slots, pages, codec, matrices, index)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, Rounding(matrices, index), backend=backend)
    assert torch.equal(pages, want)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", INDEX)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_takes_its_own_matrix(case, kind, backend):
    check(case, kind, backend, torch.device("cpu"))


@pytest.mark.parametrize("many", [False, True])
def test_triton_does_so_at_once_and_one_after_the_other(many, device, monkeypatch):
    """With few tokens, each matrix has its own programs. With many, a program uses several matrices."""
    if many:
        monkeypatch.setattr("slimkv.ops.store.triton.launch.FEW_VECTORS", 0)
    check(replace(CASES[0], tokens=8), "mixed", "triton", device)


@pytest.mark.full
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", INDEX)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_in_every_case(case, kind, many, device, monkeypatch):
    if many:
        monkeypatch.setattr("slimkv.ops.store.triton.launch.FEW_VECTORS", 0)
    check(case, kind, "triton", device)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_single_one_serves_all(backend):
    device = torch.device("cpu")
    key, value, slots, pages, codec = build(TINY, device)
    matrices = several(TINY, codec, 1)
    want = expected(key, value, slots, pages, codec, TINY.layout, matrices[0])
    ops.store_kv(key, value, PackedKV(pages, codec, TINY.layout), slots, Rounding(matrices), backend=backend)
    assert torch.equal(pages, want)


def test_what_an_index_must_be(device):
    key, value, slots, pages, codec = build(TINY, device)
    matrices = several(TINY, codec)
    good = torch.zeros(TINY.tokens, dtype=torch.int32, device=device)
    for index in (good.long(), good[:-1]):
        with pytest.raises(InputError, match="index must be contiguous int32"):
            ops.store_kv(key, value, PackedKV(pages, codec, TINY.layout), slots, Rounding(matrices, index))
    with pytest.raises(InputError, match="matrices must be a tensor, not None"):
        Rounding(None, good)
    with pytest.raises(InputError, match=r"3 matrices by position: give Rounding.index"):
        ops.store_kv(key, value, PackedKV(pages, codec, TINY.layout), slots, Rounding(matrices))
    with pytest.raises(InputError, match="several of them"):
        ops.store_kv(key, value, PackedKV(pages, codec, TINY.layout), slots, Rounding(matrices[:0]))
