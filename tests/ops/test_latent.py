"""Latents: store and gather with every backend, and attention compared with float64 on the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_cases import DTYPES, Case, build, check

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.cpu.module import compiled_unavailable_reason
from slimkv.spec import LatentSpec
from tail import sample

BACKENDS = ["reference", "cpu", "triton"]
ONE = Case(lens=(37,), queries=(1,))


def skip_unless_it_runs(backend: str, device: torch.device) -> None:
    if backend == "cpu" and (reason := compiled_unavailable_reason(device)):
        pytest.skip(reason)


def out_of(built, dtype: str = "fp32") -> torch.Tensor:
    case = built.case
    shape = built.query_latent.shape[0], case.heads, case.latent_dim
    return torch.full(shape, torch.nan, dtype=DTYPES[dtype], device=built.pages.device)


CASES = [
    Case(),
    *(replace(ONE, format=f) for f in ("c1r6", "c2r4", "c3", "c5r5", "c6r8", "c7r3", "c8r8", "cfp8rfp8", "cu4ru8")),
    replace(ONE, format="cur3rur4", heads=3),
    *(replace(ONE, format="craw", dtype=d) for d in DTYPES),
    *(replace(ONE, format="c4", dtype=d, out_dtype=d) for d in DTYPES),
    replace(ONE, latent_dim=96, rope_dim=48, format="c4"),
    Case(lens=(40, 0, 18), queries=(3, 2, 1), padding=2, heads=5),
    Case(lens=(2,), queries=(4,)),  # two of the queries precede the first token
    *(replace(ONE, page=page, lens=(130,)) for page in (32, 64, 128)),
    replace(ONE, peaked=True, scale=1.0),
    replace(ONE, heavy=True, format="c4"),
    replace(ONE, scale=-0.2),
    pytest.param(Case(latent_dim=512, rope_dim=64, heads=16, lens=(200, 33)), marks=pytest.mark.full),
    pytest.param(Case(latent_dim=512, rope_dim=64, heads=128, lens=(33, 40), queries=(2, 4)), marks=pytest.mark.full),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", sample(CASES, 3), ids=str)
def test_attend(case, backend, device):
    skip_unless_it_runs(backend, device)
    built = build(case, device)
    out, lse = out_of(built, case.out_dtype), torch.full(built.query_latent.shape[:2], torch.nan, device=device)
    built.attend(out=out, lse=lse, backend=backend)
    loose = case.format.startswith("craw") and case.dtype == "bf16" and backend == "triton"
    check(built, out, lse, 2e-2 if loose or case.out_dtype == "bf16" else 5e-3)  # bf16 probabilities, or bf16 results


ROWS = [
    Case(rows=True, lens=(40, 0, 18, 4), queries=(1, 1, 1, 1), padding=1),
    Case(rows=True, lens=(40, 18), queries=(3, 1), page=64),
    *(Case(rows=True, format=f, dtype="fp16") for f in ("c4", "c3r7", "cu4ru8", "cfp8", "craw")),
]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_attend_single_tokens(case, backend, device):
    """Sparse attention, whose table lists slots of token rows. A sequence whose tokens are all skipped gives zeros."""
    if device.type != "cpu":
        pytest.skip("on GPUs: tests/ops/cuda/test_latent_cuda.py")
    skip_unless_it_runs(backend, device)
    built = build(case, device)
    out, lse = out_of(built), torch.full(built.query_latent.shape[:2], torch.nan, device=device)
    built.attend(out=out, lse=lse, backend=backend)
    check(built, out, lse)


def test_token_rows_hold_the_codes_of_tiles(device):
    """The same latents decode to the same numbers in both layouts, and one layout is not mistaken for the other."""
    both = [build(Case(rows=rows, page=64), device) for rows in (False, True)]
    decoded = [torch.cat(ops.gather_latent(x.kv, x.slots(0), backend="reference"), 1) for x in both]
    assert torch.equal(*decoded)
    with pytest.raises(UnsupportedError, match="tiles of 16 tokens, not blocks of 1 token or token rows"):
        both[1].attend(backend="triton")
    with pytest.raises(InputError, match="the block table's 73 tokens"):
        replace(both[1], case=both[0].case).attend()


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_and_workspace(splits, device):
    built = build(Case(lens=(100, 3), queries=(2, 1), padding=1), device)
    need = ops.latent_workspace_bytes(
        built.layout, total_queries=4, sequences=2, num_heads=4, max_query_len=2, num_splits=splits, device=device
    )
    out, lse = out_of(built), torch.full((4, 4), torch.nan, device=device)
    workspace = torch.empty(need, dtype=torch.uint8, device=device)
    built.attend(out=out, lse=lse, num_splits=splits, workspace=workspace, backend="triton")
    check(built, out, lse)
    with pytest.raises(InputError, match=f"at least {need} bytes"):
        built.attend(num_splits=splits, workspace=workspace[16:], backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotation_can_be_folded_into_the_projections(backend, device):
    skip_unless_it_runs(backend, device)
    built = build(Case(), device)
    rotation = ops.latent_rotation(built.codec)
    plain = built.attend(backend=backend, out=out_of(built))
    folded = replace(built, query_latent=(built.query_latent.float() @ rotation))
    out = folded.attend(backend=backend, out=out_of(built), query_is_rotated=True, output_is_rotated=True)
    torch.testing.assert_close(out @ rotation.T, plain, atol=2e-3, rtol=0)
    assert ops.latent_rotation(Codec(LatentSpec.parse("craw"))) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_verification_equals_one_by_one(backend, device):
    skip_unless_it_runs(backend, device)
    together = build(Case(lens=(37,), queries=(4,)), device)
    out = together.attend(backend=backend, out=out_of(together))
    for i in range(4):
        alone = replace(
            together, case=replace(together.case, queries=(1,)),
            starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
            query_latent=together.query_latent[i : i + 1], query_rope=together.query_rope[i : i + 1],
            seq_lens=together.seq_lens - 3 + i,
        )  # fmt: skip
        torch.testing.assert_close(alone.attend(backend=backend, out=out_of(alone))[0], out[i], atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_marked_token_gives_nan_to_who_sees_it_only(side, backend, device):
    skip_unless_it_runs(backend, device)
    built = build(Case(lens=(37,), queries=(3,)), device)
    block, place = divmod(int(built.slots(0)[35]), built.case.page)
    field = getattr(built.layout, side).field_offset(0) + 2 * place
    built.pages[block, field : field + 2] = 0xFF
    out = built.attend(backend=backend, out=out_of(built), output_is_rotated=True)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


# -- store and gather ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["c4", "c4r8", "c6r8", "craw", "cfp8rfp8", "cu4ru8"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_stored_bytes_are_the_references(backend, format, device):
    if backend == "cpu":
        if device.type != "cpu":
            pytest.skip("for CPUs")
        skip_unless_it_runs("cpu", device)
    built = build(replace(ONE, format=format, latent_dim=256, rope_dim=64), device)
    slots = torch.cat([built.slots(0), torch.tensor([-1, -7], device=device)])
    latent, rope = (torch.cat([x, x[:2]]) for x in (built.latent, built.rope))
    garbage = torch.randint(0, 256, built.pages.shape, dtype=torch.uint8, device=device)
    pages = [garbage, garbage.clone()]
    for into, name in zip(pages, ("reference", backend), strict=True):
        kv = ops.PackedKV(into, built.codec, built.layout)
        ops.store_latent(latent, rope.unsqueeze(1), kv, slots, backend=name)
    assert torch.equal(*pages)


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_gather_into_slices_of_one_tensor(backend, device):
    skip_unless_it_runs(backend, device)
    built = build(replace(ONE, format="c6r8"), device)
    slots = torch.cat([built.slots(0), torch.tensor([-1], device=device)])
    both = torch.full((len(slots), 160), torch.nan, dtype=torch.bfloat16, device=device)
    kv = ops.PackedKV(built.pages.unsqueeze(1), built.codec, built.layout)
    latent, rope = ops.gather_latent(kv, slots, out=(both[:, :128], both[:, 128:]), backend=backend)
    assert latent.data_ptr() == both.data_ptr()
    assert (both[-1] == 0).all()
    error = (latent[:-1].float() - built.latent.float()).norm() / built.latent.float().norm()
    assert error < 0.04  # 6 bits
    assert ((rope[:-1].float() - built.rope.float()).norm() / built.rope.float().norm()) < 0.02


def test_lossless_is_lossless(device):
    built = build(replace(ONE, format="craw", dtype="fp32"), device)
    latent, rope = ops.gather_latent(built.kv, built.slots(0))
    assert torch.equal(latent, built.latent)
    assert torch.equal(rope, built.rope)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(device):
    built = build(Case(), device)
    spec = CodecSpec.parse("k4v4", 128, 32)
    key_value = ops.PackedKV(built.pages, Codec(spec, device), PageLayout(spec, 16))
    with pytest.raises(InputError, match="k4v4 is a format of K and V"):
        ops.gather_latent(key_value, built.slots(0))
    other = PageLayout(LatentSpec.parse("c4", 128, 32), 16)
    with pytest.raises(InputError, match=r"the layout is of .*'c4', .* and the codec of .*'c4r8'"):
        ops.gather_latent(replace(built.kv, layout=other), built.slots(0))
    two = built.pages.unsqueeze(1).expand(-1, 2, -1).contiguous()
    with pytest.raises(InputError, match="pages of latents have one KV head, not 2"):
        ops.gather_latent(replace(built.kv, pages=two), built.slots(0))
    with pytest.raises(InputError, match="leave out key_offset"):
        ops.gather_latent(replace(built.kv, key_offset=torch.zeros(1, 128)), built.slots(0))
    with pytest.raises(InputError, match=r"latent must be \[tokens, 128\]"):
        ops.store_latent(built.latent.unsqueeze(1), built.rope, built.kv, built.slots(0))
    with pytest.raises(InputError, match=r"query_rope must be \[\d+, \d+, 32\]"):
        replace(built, query_rope=built.query_rope[:, :2]).attend()
    with pytest.raises(InputError, match="softmax_scale must be finite"):
        replace(built, case=replace(built.case, scale=float("inf"))).attend()
    with pytest.raises(InputError, match="num_splits must be at least 1"):
        built.attend(num_splits=0)
    with pytest.raises(UnsupportedError, match="does not split keys; leave num_splits at None, not 2"):
        built.attend(num_splits=2, backend="reference")


def test_triton_names_the_sizes_it_does_not_take(device):
    built = build(replace(ONE, rope_dim=16), device)
    with pytest.raises(UnsupportedError, match="rope parts of 32 to 512, not 128 and 16"):
        built.attend(backend="triton")
    check(built, built.attend(backend="reference", out=out_of(built)))
