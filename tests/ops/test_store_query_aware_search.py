"""store with a search for the best rounding of each key: the codec's bytes in every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store_cases import Case, build, expected, random_query_aware, rows_on_boundaries

from slimkv import Codec, ops
from slimkv.errors import InputError
from slimkv.ops.plan import plan_store

CPU = torch.device("cpu")
TINY = Case(heads=2, tokens=20)
COVERING = [
    *(replace(TINY, format=f"k{bits}v3", heads=1) for bits in (1, 3, 5)),
    TINY,
    replace(TINY, dim=80, heads=1, slots="aligned", tokens=32, format="k2v4"),
    replace(TINY, dim=96, value_dim=48, heads=1, tokens=17, strided=True, dtype="fp16"),
    replace(TINY, policy="unbiased", dtype="fp32"),
]
# The interpreter takes its time for every coordinate.
TRITON = [
    (replace(TINY, dim=32, heads=1, tokens=12), 4),
    (replace(TINY, dim=32, heads=1, tokens=12, format="k5v3", policy="unbiased", dtype="fp32"), 2),
    (replace(TINY, dim=48, heads=1, tokens=12, format="k2v4", dtype="fp16", strided=True), 2),
]
FULL = [
    *COVERING,
    *(replace(TINY, format=f"k{b}v4", dim=dim, tokens=n) for b in range(1, 9) for dim in (64, 128) for n in (5, 700)),
    *(replace(TINY, dim=dim, slots=s) for dim in (16, 80, 112, 192, 256, 576) for s in ("aligned", "scattered")),
    *(replace(TINY, policy="unbiased", format=f, dtype=d) for f in ("k3v3", "k6v2") for d in ("bf16", "fp32")),
    replace(TINY, dim=128, heads=8, tokens=8192, slots="aligned", page=64),
]  # fmt: skip


def check(case: Case, search: int, backend: str, device: torch.device = CPU) -> None:
    key, value, slots, pages, codec = build(case, device)
    query_aware = random_query_aware(case.heads, codec)
    want = expected(key, value, slots, pages, codec, case.layout, query_aware, search)
    assert not torch.equal(want, expected(key, value, slots, pages, codec, case.layout, query_aware))
    ops.store_kv(
        key, value, pages, slots, codec=codec, layout=case.layout, query_aware=query_aware, query_aware_search=search,
        backend=backend,
    )  # fmt: skip
    wrong = int((pages != want).sum())
    assert not wrong, f"{wrong} of {want.numel()} bytes differ"


def check_index(backend: str, device: torch.device, case: Case = TINY) -> None:
    """Tokens that take different matrices, and the best scale of each."""
    key, value, slots, pages, codec = build(case, device)
    matrices = torch.stack([random_query_aware(case.heads, codec).roll(i, 0) // (i + 1) for i in range(3)]).contiguous()
    index = (torch.arange(case.tokens) * 7 % 5 - 1).to(torch.int32).to(device)
    want = pages.clone()
    for number in range(3):
        mine = torch.where(index.clamp(0, 2) == number, slots, -1)
        want = expected(key, value, mine, want, codec, case.layout, matrices[number], 4)
    ops.store_kv(
        key, value, pages, slots, codec=codec, layout=case.layout, query_aware=matrices, query_aware_index=index,
        query_aware_search=4, backend=backend,
    )  # fmt: skip
    assert torch.equal(pages, want)


@pytest.mark.parametrize("search", [2, 4])
@pytest.mark.parametrize("backend", ["cpu", "cpu_torch", "reference"])
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_bytes_are_the_codecs_on_a_cpu(case, backend, search):
    check(case, search, backend)


@pytest.mark.parametrize(
    ("case", "search"),
    [
        *TRITON,
        *(pytest.param(case, search, marks=pytest.mark.full) for case in FULL for search in (2, 4)),
    ],
    ids=str,
)
def test_bytes_are_the_codecs_in_triton(case, search, device):
    check(case, search, "triton", device)


@pytest.mark.parametrize("backend", ["cpu", "cpu_torch", "reference"])
def test_every_token_takes_its_own_matrix(backend):
    check_index(backend, CPU)


def test_every_token_takes_its_own_matrix_in_triton(device):
    check_index("triton", device, replace(TINY, dim=16, heads=1, tokens=12))


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.full)])
def test_equal_costs_take_the_first_scale(backend, device):
    """Rows whose coordinates are all alike up to sign: after a rotation without corrections many costs are equal."""
    device = CPU if backend == "cpu" else device
    case = Case(heads=1, dtype="fp32")
    codec = Codec(case.layout.spec, device)
    rows = torch.cat([rows_on_boundaries(codec, 1)[0], torch.zeros(2, 64), torch.eye(64)[:4]])
    key, slots = rows[:, None, :].to(device), torch.arange(len(rows), device=device)
    pages = torch.zeros(case.layout.blocks_for(len(rows)), 1, case.layout.page_bytes, dtype=torch.uint8, device=device)
    none = torch.zeros(1, 64, 64, dtype=torch.int8, device=device)
    want = expected(key, key, slots, pages, codec, case.layout, none, 4)
    ops.store_kv(
        key, key, pages, slots, codec=codec, layout=case.layout, query_aware=none, query_aware_search=4, backend=backend
    )
    assert torch.equal(pages, want)


def test_a_plan_is_for_one_search():
    key, value, slots, pages, codec = build(TINY, CPU)
    query_aware = random_query_aware(TINY.heads, codec)
    want = expected(key, value, slots, pages, codec, TINY.layout, query_aware, 2)
    plan = plan_store(
        key, value, pages, slots, codec=codec, layout=TINY.layout, query_aware=query_aware, query_aware_search=2
    )
    plan.run(key, value, slots)
    assert torch.equal(pages, want)
    assert plan.fits(key, value, pages, slots, query_aware, None, 2)
    assert not plan.fits(key, value, pages, slots, query_aware, None, 4)
    assert not plan.fits(key, value, pages, slots, query_aware)


@pytest.mark.parametrize("backend", ["cpu", "cpu_torch", "reference", "triton"])
@pytest.mark.parametrize("search", [1, 3, 8, -2, True, 2.5, "4"])
def test_other_numbers_are_refused_everywhere(search, backend):
    key, value, slots, pages, codec = build(TINY, CPU)
    query_aware = random_query_aware(TINY.heads, codec)
    with pytest.raises(InputError, match=r"query_aware_search must be (0 \(off\), 2 or 4|an integer), not"):
        ops.store_kv(
            key, value, pages, slots, codec=codec, layout=TINY.layout, query_aware=query_aware,
            query_aware_search=search, backend=backend,
        )  # fmt: skip


def test_a_search_needs_a_matrix():
    key, value, slots, pages, codec = build(TINY, CPU)
    with pytest.raises(InputError, match=r"query_aware_search=4 tries several .* query_aware is None"):
        ops.store_kv(key, value, pages, slots, codec=codec, layout=TINY.layout, query_aware_search=4)


def test_a_search_needs_a_scale_of_its_own():
    case = replace(TINY, policy="plain")
    key, value, slots, pages, codec = build(case, CPU)
    query_aware = random_query_aware(case.heads, codec)
    with pytest.raises(InputError, match="the scale policy plain has none: use norm or unbiased"):
        ops.store_kv(
            key, value, pages, slots, codec=codec, layout=case.layout, query_aware=query_aware, query_aware_search=4
        )
