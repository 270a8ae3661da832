"""The CUDA store with a warp per vector (latents, large head sizes, raw sides) writes the reference's bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from store_cases import DTYPES, Case, build, expected, rows_on_boundaries
from test_store import assert_same_bytes
from test_store_cuda import CPU, check, emulate, emulated

from slimkv import Codec, PageLayout
from slimkv.ops.store.api import REGISTRY, StoreRequest
from slimkv.ops.store.cuda import launch as store_cuda
from slimkv.ops.store.cuda import vectors
from slimkv.spec import LatentSpec
from tail import sample


@dataclass(frozen=True)
class Latents(Case):
    """Latents of ``dim`` with rope parts of ``value_dim``."""

    format: str = "c4"
    dim: int = 512
    value_dim: int | None = 64
    heads: int = 1
    tokens: int = 20
    rows: bool = False  # token rows

    @property
    def layout(self) -> PageLayout:
        spec = LatentSpec.parse(self.format, self.dim, self.value_dim)
        return PageLayout(spec.with_raw_dtype(str(DTYPES[self.dtype]).removeprefix("torch.")), self.page, self.rows)


PLAIN = Latents()
EMULATED = [
    PLAIN,
    replace(PLAIN, slots="aligned", page=64),
    replace(PLAIN, format="c4r8", dtype="fp16"),
    replace(PLAIN, format="c6r6", dtype="fp32", slots="unaligned"),
    replace(PLAIN, dim=384, value_dim=32, format="c3r7"),
    replace(PLAIN, dim=256),
    replace(PLAIN, format="cfp8rfp8", strided=True, slot_dtype="int32"),
    Case(format="k8v3", dim=512, tokens=9),
    replace(PLAIN, rows=True, page=64),
    replace(PLAIN, rows=True, dim=128, value_dim=32, format="c7r6"),
    replace(PLAIN, rows=True, format="crawrfp8", dtype="fp16", slots="aligned"),
]
FORMATS = [
    *(replace(PLAIN, format=f"c{b}r{b}", slots=s) for b, s in product(range(1, 9), ("scattered", "aligned"))),
    *(replace(PLAIN, format=f, dtype=d) for f, d in product(("c4", "c4r8", "cfp8", "craw"), DTYPES)),
    *(replace(PLAIN, dim=dim, value_dim=rope) for dim, rope in product((64, 128, 192, 256, 320, 384, 448), (32, 128))),
    *(replace(PLAIN, dim=dim, format="c6rfp8", dtype="fp32") for dim in (192, 320, 448)),
    *(replace(PLAIN, format="c4", page=page, slot_dtype="int32", strided=True) for page in (32, 64, 128)),
    *(replace(PLAIN, tokens=tokens, slots=s) for tokens in (1, 33, 700, 1500, 8197) for s in ("aligned", "unaligned")),
    *(replace(PLAIN, tokens=tokens, format="c4r8", page=64) for tokens in (5, 300, 5000)),
    *(replace(PLAIN, rows=True, page=64, format=f, tokens=700) for f in ("c4", "c4r8", "c5r3", "craw", "cfp8r6")),
    Case(format="krawbf16v4", dim=512, tokens=3000),
    Case(format="k3vrawfp32", dim=384, heads=3),
    Case(format="k4v4", dim=512, tokens=300),
    Case(format="k6v2", dim=384),
    Case(format="k4v5", dim=512),
]


@emulated
@pytest.mark.parametrize("case", sample(EMULATED, 2), ids=str)
def test_bytes_are_the_codecs(case):
    check(case)


@emulated
def test_warps_take_several_vectors(monkeypatch):
    monkeypatch.setattr(vectors, "_BLOCKS", 1)
    check(replace(PLAIN, tokens=30))


@pytest.mark.gpu
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_on_a_gpu(case, device):
    check(case, run=store_cuda.run, device=device)


@emulated
def test_ties():
    case = Case(heads=1, format="k4v8", dim=512)
    codec = Codec(case.layout.spec)
    rows, exact = rows_on_boundaries(codec, per_boundary=1)
    assert exact >= 3
    key, slots = rows[:, None, :], torch.arange(len(rows))
    pages = torch.zeros(case.layout.blocks_for(len(rows)), 1, case.layout.page_bytes, dtype=torch.uint8)
    want = expected(key, key, slots, pages, codec, case.layout)
    emulate(StoreRequest(key, key, pages, slots, codec, case.layout))
    assert_same_bytes(pages, want, case.layout)


def check_marks(run, device: torch.device) -> None:
    """NaN, Inf and norms beyond a scale's range are marked; raw numbers are unchanged."""
    case = replace(PLAIN, format="c4rfp8", dtype="fp32", slots="aligned")
    _, _, slots, pages, codec = build(case, device)
    generator = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(case.tokens, 1, dim, generator=generator).to(device) for dim in (512, 64))
    latent[3, 0, 500], latent[4], rope[9, 0, 63], latent[10] = torch.nan, 3e38, -torch.inf, 0
    want = expected(latent, rope, slots, pages, codec, case.layout)
    run(StoreRequest(latent, rope, pages, slots, codec, case.layout))
    assert_same_bytes(pages, want, case.layout)


@emulated
def test_tokens_that_cannot_be_encoded_are_marked():
    check_marks(emulate, CPU)


@pytest.mark.gpu
def test_tokens_that_cannot_be_encoded_are_marked_on_a_gpu(device):
    check_marks(store_cuda.run, device)


def check_any_start(run, device: torch.device) -> None:
    """Rows without 16-byte alignment, in a slice of a wider tensor."""
    case = replace(PLAIN, tokens=5)
    key, value, slots, pages, codec = build(case, device)
    wide = torch.zeros(case.tokens, 1, 1 + 512 + 64, dtype=key.dtype, device=device)
    wide[..., 1:513], wide[..., 513:] = key, value
    key, value = wide[..., 1:513], wide[..., 513:]
    want = expected(key, value, slots, pages, codec, case.layout)
    run(StoreRequest(key, value, pages, slots, codec, case.layout))
    assert_same_bytes(pages, want, case.layout)


@emulated
def test_rows_may_start_anywhere():
    check_any_start(emulate, CPU)


@pytest.mark.gpu
def test_rows_may_start_anywhere_on_a_gpu(device):
    check_any_start(store_cuda.run, device)


def test_what_it_does_not_take_is_named():
    for case, reason in (
        (Case(format="k4vu4", dim=384), "not u4; triton stores uniform codes"),
        (Case(format="krawbf16v4", dim=128), "above 256; use backend='triton'"),
        (Case(format="k4v4", dim=576), "up to 512, not 576"),
        (Case(format="k4v4", dim=272, value_dim=512), "does not support a head size of 272"),
        (Case(page=1), "blocks of 1 token"),
    ):
        key, value, slots, pages, codec = build(case, CPU)
        assert reason in (store_cuda.supports(StoreRequest(key, value, pages, slots, codec, case.layout)) or "")


def test_raw_sides_take_their_own_dtype():
    key, value, slots, pages, codec = build(PLAIN, CPU)
    assert "stores bfloat16" in (
        store_cuda.supports(StoreRequest(key, value.float(), pages, slots, codec, PLAIN.layout)) or ""
    )


@pytest.mark.gpu
def test_latents_get_it_by_default(device):
    key, value, slots, pages, codec = build(PLAIN, device)
    assert REGISTRY.select(device, StoreRequest(key, value, pages, slots, codec, PLAIN.layout)).name == "cuda"


@pytest.mark.parametrize("architecture", sample(["sm_90", "sm_80", "sm_120", "sm_100"], 2))
def test_it_compiles_for(architecture):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    from slimkv.ops.cuda.compiler import compile_kernels

    key, value, slots, pages, _ = build(PLAIN, CPU)
    plan, _, _ = vectors.prepare(StoreRequest(key, value, pages, slots, Codec(PLAIN.layout.spec), PLAIN.layout))
    assert compile_kernels(plan.source, plan.defines, architecture).startswith(b"\x7fELF")
