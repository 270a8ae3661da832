"""The CUDA gather of latents and large vectors: the codec's numbers, lane by lane on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import host
import pytest
import torch
from store_cases import DTYPES, Case, build
from test_store_cuda import CPU, emulated
from test_store_vectors_cuda import PLAIN, Latents

from slimkv import ops
from slimkv.codec import scale16
from slimkv.codec.pack import take_tokens
from slimkv.ops import PackedKV
from slimkv.ops.gather.api import REGISTRY, GatherRequest
from slimkv.ops.gather.cuda import launch as gather_cuda
from tail import sample

ROUNDED = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 1.5e-7}  # relative, of the output's type
EMULATED = [
    (PLAIN, False, "bf16"),
    (PLAIN, True, "fp16"),
    (replace(PLAIN, format="c3r7", dim=384, value_dim=32, page=64), False, "fp32"),
    (replace(PLAIN, format="c6r8", dtype="fp32"), False, "fp32"),
    (replace(PLAIN, format="cfp8rfp8", slot_dtype="int32"), False, "fp32"),
    (Case(format="k5v1", dim=512, tokens=9), False, "fp32"),
]
ON_A_GPU = [
    *((replace(PLAIN, format=f"c{b}r{b}", dtype="fp32"), r, "fp32") for b, r in product(range(1, 9), (False, True))),
    *((replace(PLAIN, format=f, dtype=d), False, d) for f, d in product(("c4", "c4r8", "cfp8", "craw"), DTYPES)),
    *((replace(PLAIN, dim=d, value_dim=128, page=128), False, "fp32") for d in (64, 192, 320, 384, 448)),
    *((replace(PLAIN, tokens=n, slots=s), False, "bf16") for n in (1, 33, 3000) for s in ("aligned", "scattered")),
    (Case(format="k4v4", dim=512, tokens=300), False, "fp32"),
]


def emulate(request: GatherRequest) -> None:
    """What ``gather_cuda.run`` does, on the emulated GPU."""
    plan, grid, args = gather_cuda.prepare(request)
    library = host.compile(Path(gather_cuda.SOURCE), plan.defines)
    threads = 32 * gather_cuda.vectors.WARPS
    host.launch(library, gather_cuda.KERNEL, grid=grid, threads=threads, shared=plan.shared, args=args)


def check(case: Case, rotated: bool, dtype: str, run=emulate, device: torch.device = CPU, aligned: bool = True) -> None:
    """Against codes decoded in float64; what is written nowhere else, and zeros for negative slots."""
    key, value, slots, pages, codec = build(case, device)
    layout = case.layout
    small = [(x.double() / x.double().norm(dim=-1, keepdim=True).clamp(min=1e-30)).to(x.dtype) for x in (key, value)]
    ops.store_kv(*small, PackedKV(pages, codec, layout), slots, backend="reference")
    apart = 16 if aligned else 3
    wide = [
        torch.full((case.tokens, case.heads, x.shape[-1] + apart), torch.nan, dtype=DTYPES[dtype], device=device)
        for x in (key, value)
    ]
    out = [x[..., : -apart if aligned else -2][..., 0 if aligned else 1 :] for x in wide]
    request = GatherRequest(pages, slots, *out, codec, layout, rotated)
    assert gather_cuda.supports(request) is None
    run(request)
    keep = slots >= 0
    encoded = take_tokens(layout, pages, slots[keep].long())
    want = [
        decoded.double() @ tables.hadamard.T * tables.orthonormal if side.rotated and not rotated else decoded.double()
        for side, decoded, tables in (
            (layout.spec.key, codec.decode_key(encoded[0], rotated=True), codec.key_tables),
            (layout.spec.value, codec.decode_value(encoded[1], rotated=True), codec.value_tables),
        )
    ]
    for got, right, whole in zip(out, want, wide, strict=True):
        assert (got[~keep] == 0).all()
        assert whole.isnan().sum() == whole.numel() - got.numel()
        error = (got[keep].double() - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-3)
        assert error.max() <= ROUNDED[dtype], f"{error.max():.1e}"


@emulated
@pytest.mark.parametrize(("case", "rotated", "dtype"), EMULATED, ids=str)
def test_numbers_are_the_codecs(case, rotated, dtype):
    check(case, rotated, dtype)


@emulated
def test_rows_may_start_anywhere():
    check(replace(PLAIN, tokens=5), False, "bf16", aligned=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rotated", "dtype"), ON_A_GPU, ids=str)
def test_on_a_gpu(case, rotated, dtype, device):
    check(case, rotated, dtype, gather_cuda.run, device)
    check(case, rotated, dtype, gather_cuda.run, device, aligned=False)


def check_marks(run, device: torch.device) -> None:
    """A token that could not be encoded is NaN, and no other; raw numbers come back bit for bit."""
    case = replace(PLAIN, slots="aligned")
    latent, rope, slots, pages, codec = build(case, device)
    latent = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0)).to(device, latent.dtype)
    ops.store_kv(latent, rope, PackedKV(pages, codec, case.layout), slots, backend="reference")
    at = case.layout.key.fields_offset + 2 * int(slots[3] % case.page)
    pages[slots[3] // case.page, 0, at : at + 2] = scale16.INVALID & 0xFF
    out = torch.empty_like(latent), torch.empty_like(rope)
    run(GatherRequest(pages, slots, *out, codec, case.layout, False))
    assert out[0][3].isnan().all()
    assert not out[0][torch.arange(case.tokens) != 3].isnan().any()
    assert torch.equal(out[1].view(torch.int16), rope.view(torch.int16))


@emulated
def test_marked_tokens_are_nan():
    check_marks(emulate, CPU)


@pytest.mark.gpu
def test_marked_tokens_are_nan_on_a_gpu(device):
    check_marks(gather_cuda.run, device)


def test_what_it_does_not_take_is_named():
    for case, reason in (
        (Case(), "beyond 256; triton"),
        (Case(dim=576), "up to 512, not 576"),
        (Latents(page=1), "blocks of 1 token"),
    ):
        key, value, slots, pages, codec = build(case, CPU)
        request = GatherRequest(pages, slots, key, value, codec, case.layout, False)
        assert reason in (gather_cuda.supports(request) or "")


@pytest.mark.gpu
def test_latents_get_it_by_default(device):
    key, value, slots, pages, codec = build(PLAIN, device)
    assert REGISTRY.select(device, GatherRequest(pages, slots, key, value, codec, PLAIN.layout, False)).name == "cuda"


@pytest.mark.parametrize("architecture", sample(["sm_90", "sm_80", "sm_120", "sm_100"], 2))
def test_it_compiles_for(architecture):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    from slimkv.ops.cuda.compiler import compile_kernels

    key, value, slots, pages, codec = build(PLAIN, CPU)
    plan, _, _ = gather_cuda.prepare(GatherRequest(pages, slots, key, value, codec, PLAIN.layout, False))
    assert compile_kernels(gather_cuda.SOURCE, plan.defines, architecture).startswith(b"\x7fELF")
