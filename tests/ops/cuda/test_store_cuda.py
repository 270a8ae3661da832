"""The CUDA store writes the reference's bytes: emulated lane by lane on a CPU, and on a GPU if available."""

from __future__ import annotations

from pathlib import Path

import host
import numpy as np
import pytest
import torch
from store_cases import (
    Case,
    build,
    build_beside_boundaries,
    expected,
    random_query_aware,
    rows_on_boundaries,
)
from test_store import COVERING, MATRIX, assert_same_bytes
from test_store_query_aware import COVERING as QUERY_AWARE
from test_store_query_aware import FULL as ALL_QUERY_AWARE

from slimkv import Codec
from slimkv.codec.codebook import LEVEL_DENOMINATOR, codebook
from slimkv.ops.store.api import REGISTRY, StoreRequest
from slimkv.ops.store.cuda import launch as store_cuda
from slimkv.ops.store.cuda.args import cells
from slimkv.ops.store.cuda.vectors import format_refusal
from slimkv.spec import CodecSpec
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")


def emulate(request: StoreRequest) -> None:
    """``store_cuda.run`` on the emulated GPU."""
    plan, grid, args = store_cuda.prepare(request)
    library = host.compile(Path(plan.source), plan.defines)
    host.launch(library, plan.kernel, grid=grid, threads=plan.threads, shared=plan.shared, args=args)


def taken(case: Case, shaped: bool = False) -> bool:
    """Whether a kernel supports the case, in tiles or vector by vector."""
    if case.policy != "norm" or store_cuda.format_refusal(case.layout) is not None:
        return False
    by_vector = format_refusal(case.layout) is None
    return store_cuda.in_tiles(case.layout) or (not shaped and by_vector)


def check(case: Case, shaped: bool = False, run=emulate, device: torch.device = CPU, times: int = 1) -> None:
    key, value, slots, pages, codec = build(case, device)
    query_aware = None
    if shaped:
        query_aware = (random_query_aware(case.heads, codec).int() * times).clamp(-127, 127).to(torch.int8)
    want = expected(key, value, slots, pages, codec, case.layout, query_aware)
    assert not torch.equal(want, pages)
    request = StoreRequest(key, value, pages, slots, codec, case.layout, query_aware)
    assert store_cuda.supports(request) is None
    run(request)
    assert_same_bytes(pages, want, case.layout)


def named(cases: list[Case], shaped: bool = False) -> list:
    return [pytest.param(case, id=str(case)) for case in cases if taken(case, shaped)]


@emulated
@pytest.mark.parametrize("case", sample(named(COVERING), 4))
def test_bytes_are_the_codecs(case):
    check(case)


@emulated
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "case",
    sample(
        [
            Case(dim=128, heads=1, tokens=24),
            Case(dim=128, heads=1, tokens=40, format="k3v5", slots="aligned"),
            Case(dim=256, heads=1, tokens=16, format="k2v6"),
            Case(dim=96, heads=1, tokens=16, format="k3v5"),
            Case(dim=192, heads=1, tokens=16, format="k1v2"),
            Case(dim=192, heads=1, tokens=16, dtype="fp32", strided=True),
            Case(dim=112, heads=1, tokens=20, dtype="fp16", format="k1v1"),
        ],
        2,
    ),
    ids=str,
)
def test_a_tile_for_a_warp_and_a_tile_for_several(case, many, monkeypatch):
    """Both partitions of work, whatever the number of tokens."""
    monkeypatch.setattr(store_cuda, "FEW_VECTORS", 0 if many else 1 << 40)
    check(case)


@emulated
@pytest.mark.parametrize(
    "case",
    sample(
        [
            Case(dim=128, heads=2, tokens=20, format="k5v5"),
            Case(dim=128, heads=1, tokens=33, format="k6v7", slots="aligned"),
            Case(dim=128, heads=1, tokens=17, format="k8v8", dtype="fp32", strided=True),
            Case(dim=128, heads=2, tokens=16, format="k5v4", dtype="fp16"),
            Case(dim=128, heads=1, tokens=5, format="k7v5"),
            Case(dim=64, value_dim=128, heads=1, tokens=19, format="k5v6"),
            Case(dim=64, heads=3, tokens=1, format="k4v5", slot_dtype="int32"),
            Case(dim=32, heads=1, tokens=40, format="k8v6", dtype="fp32", slots="aligned"),
            Case(dim=48, heads=1, tokens=18, format="k8v8"),
        ],
        2,
    ),
    ids=str,
)
def test_a_warp_for_every_slice(case):
    check(case)


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_squares_of_the_nearest_levels_fit_32_bits(bits, dim):
    """The norm of the levels is at most that of the vector plus that of the largest distances to levels."""
    book, unit = codebook(bits, dim), Codec(CodecSpec.parse(f"k{bits}v{bits}", dim)).key_tables.unit
    levels = np.sort(book.levels_by_code)
    away = max(np.abs(book.boundaries - levels[1:]).max(), np.abs(book.boundaries - levels[:-1]).max())
    assert dim * ((unit + away) * LEVEL_DENOMINATOR) ** 2 < 2**32


@emulated
@pytest.mark.parametrize("case", sample(named(QUERY_AWARE, shaped=True), 3))
def test_query_aware_rounding_is_the_codecs(case):
    check(case, shaped=True)


@emulated
@pytest.mark.parametrize("format", ["k5v5", "k6v3", "k7v4"])
def test_query_aware_rounding_of_few_tokens_by_records_of_cells_and_without(format):
    check(Case(dim=128, heads=1, tokens=20, format=format), shaped=True)


@emulated
@pytest.mark.parametrize("dim", sample([112, 128, 208, 256], 2))
def test_query_aware_rounding_of_many_tokens(dim, monkeypatch):
    monkeypatch.setattr(store_cuda, "FEW_VECTORS", 0)
    check(Case(dim=dim, heads=2, tokens=72, slots="aligned"), shaped=True)


@emulated
@pytest.mark.parametrize("format", ["k4v4", "k6v4"])
def test_errors_are_limited_to_a_byte(format):
    """Weights are so large that corrections far exceed the errors."""
    check(Case(format=format, tokens=20), shaped=True, times=9)


def check_index(run, device: torch.device, tokens: int = 40) -> None:
    """Tokens of one warp with different matrices or the same one, and a partial last warp."""
    case = Case(heads=2, tokens=tokens)
    for index in (torch.arange(tokens) * 7 % 5 - 1, torch.full((tokens,), 2)):
        key, value, slots, pages, codec = build(case, device)
        matrices = torch.stack([random_query_aware(case.heads, codec).roll(i, 0) // (i + 1) for i in range(3)])
        index = index.to(torch.int32).to(device)
        want = pages.clone()
        for number in range(3):
            mine = torch.where(index.clamp(0, 2) == number, slots, -1)
            want = expected(key, value, mine, want, codec, case.layout, matrices[number])
        run(StoreRequest(key, value, pages, slots, codec, case.layout, matrices.contiguous(), index))
        assert torch.equal(pages, want)


@pytest.mark.parametrize("few", [True, False])
def test_every_token_takes_its_own_matrix(few, monkeypatch):
    """Each matrix has its own thread blocks, or a warp processes several matrices in turn."""
    monkeypatch.setattr(store_cuda, "FEW_VECTORS", 8192 if few else 0)
    check_index(emulate, CPU)


@pytest.mark.gpu
def test_every_token_takes_its_own_matrix_on_a_gpu(device):
    for tokens in (7, 40, 3000):
        check_index(store_cuda.run, device, tokens)


@emulated
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("bits", [4, 6])
def test_ties(bits, shaped):
    case = Case(heads=1, format=f"k{bits}v{bits}")
    codec = Codec(case.layout.spec)
    rows, exact = rows_on_boundaries(codec)
    assert exact >= 3 or bits > 4
    key, slots = rows[:, None, :], torch.arange(len(rows))
    pages = torch.zeros(case.layout.blocks_for(len(rows)), 1, case.layout.page_bytes, dtype=torch.uint8)
    query_aware = torch.zeros(1, 64, 64, dtype=torch.int8) if shaped else None
    want = expected(key, key, slots, pages, codec, case.layout, query_aware)
    emulate(StoreRequest(key, key, pages, slots, codec, case.layout, query_aware))
    assert_same_bytes(pages, want, case.layout)


def check_products(dtype: str, run, device: torch.device) -> None:
    case, rows, slots, pages, codec, want = build_beside_boundaries(dtype, device)
    run(StoreRequest(rows, rows, pages, slots, codec, case.layout))
    assert_same_bytes(pages, want, case.layout)


@emulated
@pytest.mark.parametrize("dtype", sample(["bf16", "fp16"], 2))
def test_products_are_compared_as_they_are(dtype):
    """Coordinates closer to a boundary than float32 can represent."""
    check_products(dtype, emulate, CPU)


@emulated
@pytest.mark.parametrize("format", ["k4v4", "k4vfp8", "fp8"])
def test_tokens_that_cannot_be_encoded_are_marked(format):
    case = Case(format=format, heads=1, tokens=32, slots="aligned", dtype="fp32")
    _, _, slots, pages, codec = build(case, CPU)
    key, value = torch.randn(2, case.tokens, 1, case.dim, generator=torch.Generator().manual_seed(0))
    key[3, 0, 5], value[9, 0, 63], key[17] = torch.nan, -torch.inf, 3e38
    want = expected(key, value, slots, pages, codec, case.layout)
    emulate(StoreRequest(key, value, pages, slots, codec, case.layout))
    assert_same_bytes(pages, want, case.layout)


@pytest.mark.parametrize("dim", [16, 80, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_cells_reach_as_far_as_a_norm_can_be_wrong(dim, bits):
    """The largest coordinate of the vector whose norm, in steps, is most underestimated: all other ones are ties."""
    ties = torch.arange(0, 128, 2, dtype=torch.float64)  # steps of a coordinate; the largest has at least 128
    norms = (128**2 + (dim - 1) * (ties + 0.5) ** 2).sqrt(), (128**2 + (dim - 1) * ties**2).sqrt()
    largest = Codec.from_format(f"k{bits}v{bits}", dim).key_tables.unit * dim**0.5
    shift, zero, numbers = cells(codebook(bits, dim), largest)
    assert zero > largest * 2**shift * float((norms[0] / norms[1]).max()) + 1
    assert len(numbers) == 2 * zero


@pytest.mark.gpu
@pytest.mark.parametrize("case", named([*COVERING, *MATRIX]))
def test_on_a_gpu(case, device):
    check(case, run=store_cuda.run, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", named([*QUERY_AWARE, *ALL_QUERY_AWARE], shaped=True))
def test_query_aware_rounding_on_a_gpu(case, device):
    check(case, True, store_cuda.run, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_are_compared_as_they_are_on_a_gpu(dtype, device):
    check_products(dtype, store_cuda.run, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_vectors_of_any_size_on_a_gpu(dtype, device):
    """Covers every exponent, and the full range of arguments of square roots and quotients."""
    case = Case(dim=128, heads=8, tokens=1 << 15, slots="aligned", dtype=dtype, page=64)
    check(case, run=store_cuda.run, device=device)


@pytest.mark.gpu
def test_it_is_what_a_gpu_gets_by_default(device):
    key, value, slots, pages, codec = build(Case(dim=128), device)
    request = StoreRequest(key, value, pages, slots, codec, Case(dim=128).layout)
    assert REGISTRY.select(device, request).name == "cuda"


@pytest.mark.parametrize("architecture", sample(["sm_90", "sm_80", "sm_120", "sm_100"], 2))
@pytest.mark.parametrize("shaped", [False, True])
def test_it_compiles_for(architecture, shaped):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    from slimkv.ops.cuda.compiler import compile_kernels

    case = Case(dim=128, heads=1, tokens=16)
    key, value, slots, pages, codec = build(case, CPU)
    query_aware = random_query_aware(1, codec) if shaped else None
    plan, _, _ = store_cuda.prepare(StoreRequest(key, value, pages, slots, codec, case.layout, query_aware))
    assert compile_kernels(store_cuda.SOURCE, plan.defines, architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(format="turboquant_4bit_nc"), "not u4; triton stores uniform codes"),
        (Case(format="kur4v4"), "not ur4; triton stores uniform codes"),
        (Case(policy="unbiased"), "key_policy='unbiased' needs backend='reference'"),
        (Case(format="kfp8v4", policy="plain"), "value_policy='plain' needs backend='reference'"),
    ],
    ids=str,
)
def test_what_it_leaves_to_others_is_named(case, message):
    key, value, slots, pages, codec = build(case, CPU)
    reason = store_cuda.supports(StoreRequest(key, value, pages, slots, codec, case.layout))
    assert reason is not None
    assert message in reason
