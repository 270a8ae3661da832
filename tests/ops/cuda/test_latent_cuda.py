"""``attend_latent`` in CUDA, compared with float64 on the same codes: emulated on a CPU, and on a GPU if available."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import cubin
import host
import pytest
import sass
import torch
from latent_cases import DTYPES, Built, Case, build, check

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import Device
from slimkv.ops.latent.cuda import launch as latent_cuda
from slimkv.ops.latent.cuda.config import COLUMNS, NARROW, WIDE, config_for
from slimkv.spec import LatentSpec, PageLayout
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")
H200 = Device(multiprocessors=132, shared_of_multiprocessor=233472, shared_of_block=232448)
SMALL = replace(H200, multiprocessors=3)


def launch(source, name, defines, grid, threads, shared, args) -> None:
    library = host.compile(Path(source), defines)
    host.launch(library, name, grid=grid, threads=threads, shared=shared, args=args)


def stored_space(built: Built) -> Built:
    """The case with latent queries rotated to the stored space, as backends receive them."""
    rotation = ops.latent_rotation(built.codec)
    if rotation is None:
        return built
    return replace(built, query_latent=(built.query_latent.float() @ rotation).to(built.query_latent.dtype))


def attend_and_check(
    case: Case, device: Device = H200, workspace: torch.Tensor | None = None, apart: int = 0
) -> torch.Tensor:
    """Attends on the emulated GPU, with latent queries in float32. ``apart`` unused heads separate the output rows of
    queries."""
    built = build(case, CPU)
    rotation = ops.latent_rotation(built.codec)
    own = stored_space(replace(built, query_latent=built.query_latent.float()))
    queries, heads = built.query_latent.shape[:2]
    out = torch.full((queries, heads + apart, case.latent_dim), torch.nan, dtype=DTYPES[case.out_dtype])[:, :heads]
    lse = torch.full((queries, heads), torch.nan)
    request = replace(own.request(out, lse), workspace=workspace)
    assert latent_cuda.refusal(request) is None
    latent_cuda.attend(request, device, launch)
    check(built, out if rotation is None else out.float() @ rotation.T, lse, 2e-2 if case.out_dtype == "bf16" else 5e-3)
    return out


EMULATED = [
    Case(lens=(150, 0, 66), queries=(3, 1, 2), padding=2, heads=5),
    Case(format="c4", heads=16, page=64),
    Case(format="c2r6", lens=(70,), queries=(1,), heads=1, rope_dim=64),
    Case(format="c6r7", lens=(70,), queries=(1,), heads=8),
    Case(format="c3", dtype="fp16", out_dtype="fp16", lens=(20,), queries=(1,), heads=8),
    Case(format="cfp8rfp8", lens=(70,), queries=(1,), scale=-0.1, latent_dim=192),
    Case(format="c8r8", lens=(2,), queries=(4,), out_dtype="bf16", page=128),
    Case(peaked=True, scale=1.0, lens=(130,), queries=(1,)),
]
ROWS_AS_COLUMNS = [  # 24 and 32 rows, in one work tile or several
    Case(format="c4", heads=17, lens=(70, 5), page=64),
    Case(format="c6r8", lens=(70,), queries=(1,), heads=20, page=128),
    Case(format="c4", peaked=True, scale=1.0, lens=(330,), queries=(1,), heads=30, latent_dim=256, rope_dim=64),
    Case(heads=10, lens=(200, 0, 9), queries=(3, 1, 1), padding=1, page=32),
    Case(format="c5r6", heads=16, lens=(270, 130), queries=(4, 1), page=32, padding=1, latent_dim=256),
    Case(format="cfp8rfp8", lens=(70,), queries=(1,), scale=-0.1, heads=24),
    Case(format="c3", dtype="fp16", out_dtype="fp16", lens=(20,), queries=(5,), heads=8, latent_dim=192),
    Case(format="c8r7", lens=(2,), queries=(7,), heads=4, out_dtype="bf16", rope_dim=64),
    Case(format="c1", peaked=True, scale=1.0, lens=(330,), queries=(1,), heads=32, rope_dim=128),
    Case(format="c7", heavy=True, lens=(130,), queries=(3,), heads=10, latent_dim=64),
]
MANY_ROWS = [
    Case(heads=20, lens=(200, 0, 9), queries=(2, 1, 1), padding=1, page=32),
    Case(heads=65, lens=(70,), queries=(1,)),
    Case(format="cfp8rfp8", lens=(70,), queries=(1,), scale=-0.1, heads=40),
    Case(format="c3", dtype="fp16", out_dtype="fp16", lens=(20,), queries=(5,), heads=8),
    Case(peaked=True, scale=1.0, lens=(130,), queries=(1,), heads=98),
    Case(format="c4", peaked=True, scale=1.0, lens=(130,), queries=(1,), heads=40),
]
TOKEN_ROWS = [
    Case(format="c4", rows=True, rope_dim=64, heads=5, lens=(150, 0, 66, 4), queries=(1, 1, 1, 1), padding=2),
    Case(format="c4", rows=True, rope_dim=64, latent_dim=256, heads=70, lens=(130,), queries=(1,), page=64),
    Case(format="c4", rows=True, rope_dim=64, latent_dim=512, heads=20, lens=(200, 70), page=64, out_dtype="bf16"),
    Case(format="c4", rows=True, rope_dim=64, heads=9, lens=(130,), queries=(3,), dtype="fp16", peaked=True, scale=1.0),
]
TILES_OF_FEW = Case(format="c4", latent_dim=64, rope_dim=128, lens=(70, 9), queries=(1, 2), heads=20)


@emulated
@pytest.mark.parametrize("case", sample(EMULATED, 2), ids=str)
def test_attend(case):
    attend_and_check(case)


@emulated
@pytest.mark.parametrize("case", sample(ROWS_AS_COLUMNS, 3), ids=str)
def test_attend_rows_as_columns(case):
    assert config_for(case.layout, case.heads * max(case.queries), H200).kernel in COLUMNS
    attend_and_check(case, SMALL)


@emulated
@pytest.mark.parametrize("case", sample(MANY_ROWS, 2), ids=str)
def test_attend_many_rows(case):
    assert config_for(case.layout, case.heads * max(case.queries), H200).kernel is WIDE
    attend_and_check(case, SMALL)


@emulated
@pytest.mark.parametrize("case", sample(TOKEN_ROWS, 3), ids=str)
def test_attend_single_tokens(case):
    assert config_for(case.layout, case.heads, H200).kernel is WIDE
    attend_and_check(case, SMALL)


@emulated
def test_attend_many_rows_in_tiles_of_few():
    config = config_for(TILES_OF_FEW.layout, 40, H200)
    assert config.kernel is NARROW
    assert config.row_tiles(40) == 3
    attend_and_check(TILES_OF_FEW, SMALL)


@emulated
@pytest.mark.parametrize(
    ("format", "heads"), sample([("c4", 16), ("c4r8", 16), ("c6r8", 16), ("c4", 32), ("c6r8", 24)], 2)
)
def test_rings_go_round(format, heads):
    """One thread block processes two whole sequences, so that both teams have several KV blocks."""
    case = Case(format=format, heads=heads, page=16, lens=(650, 40), queries=(1, 1))
    attend_and_check(case, replace(H200, multiprocessors=1))


@emulated
@pytest.mark.parametrize("heads", [4, 20])
def test_more_sequences_than_lanes_of_a_warp(heads):
    """Thread blocks start inside sequences and process several each; some sequences have no tokens."""
    case = Case(heads=heads, lens=(0, *(33, 5, 0, 64, 130) * 7, 0), queries=(1,) * 37, padding=1)
    attend_and_check(case, replace(H200, multiprocessors=11))


@emulated
@pytest.mark.parametrize("heads", [4, 20, 40])
@pytest.mark.parametrize(("multiprocessors", "apart"), [(6, 0), (6, 1), (2, 0)])
def test_whole_work_tiles_and_parts(heads, multiprocessors, apart):
    """Thread blocks write whole work tiles if output rows are evenly spaced; there may be more tiles than blocks."""
    case = Case(heads=heads, lens=(64, 64, 0, 64, 64), queries=(1,) * 5, out_dtype="bf16", padding=1)
    attend_and_check(case, replace(H200, multiprocessors=multiprocessors), apart=apart)


@emulated
@pytest.mark.parametrize(("format", "heads"), sample([("c4", 8), ("c6", 8), ("c4", 40), ("c6", 20)], 2))
def test_parts_and_workspace(format, heads):
    case = Case(format=format, heads=heads, page=64, lens=(700, 3, 130), queries=(1, 1, 1))
    need = latent_cuda.workspace_bytes(case.layout, 3, 3, heads, 1, SMALL)
    attend_and_check(case, SMALL, workspace=torch.empty(need, dtype=torch.uint8))
    with pytest.raises(InputError, match="workspace must be contiguous uint8 of at least"):
        attend_and_check(case, SMALL, workspace=torch.empty(64, dtype=torch.uint8))


@emulated
@pytest.mark.parametrize(("multiprocessors", "warps"), sample([(1, 2), (2, 4), (5, 8), (30, 32)], 3))
def test_few_rows_are_merged_by_more_warps(multiprocessors, warps):
    case = Case(format="c4", heads=9, page=64, lens=(1100,), queries=(1,))
    device = replace(H200, multiprocessors=multiprocessors)
    assert latent_cuda.merge_warps(16, case.latent_dim, device) == warps
    attend_and_check(case, device)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("format", ["c4", "c4r8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_the_size_of_deepseek(format, heads):
    attend_and_check(Case(format=format, latent_dim=512, rope_dim=64, heads=heads, lens=(200, 33), page=64), SMALL)


@emulated
def test_a_marked_token_gives_nan_to_who_sees_it_only():
    for side, heads in product(("key", "value"), (4, 20)):
        built = build(Case(lens=(70,), queries=(3,), heads=heads), CPU)
        block, place = divmod(int(built.slots(0)[68]), built.case.page)
        field = getattr(built.layout, side).field_offset(0) + 2 * place
        built.pages[block, field : field + 2] = 0xFF
        out = torch.full((3, heads, 128), torch.nan)
        latent_cuda.attend(stored_space(built).request(out), SMALL, launch)
        assert out[0].isfinite().all()
        assert out[1:].isnan().all()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(format="cu4"), "latent format u4 is not one of its formats"),
        (Case(format="c4r4"), "rope format 4 is not one of its formats"),
        (Case(format="craw"), "latent format rawbf16"),
        (Case(format="c6", rows=True, rope_dim=64), "in token rows it reads 4-bit Lloyd-Max latents"),
        (
            Case(format="c4", rows=True),
            "rope part of 64 numbers of 16 bits (format 'c4'), not c4rrawbf16 of 128 and 32",
        ),
        (Case(latent_dim=96), "a latent of 96 with a rope part of 32 is not one of its sizes"),
        (Case(rope_dim=48), "a latent of 128 with a rope part of 48 is not one of its sizes"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    assert reason in latent_cuda.refusal(built.request(torch.empty(2, 4, case.latent_dim)))


def test_a_bfloat16_rope_part_wants_bfloat16_queries():
    built = build(Case(format="c4"), CPU)
    request = replace(built, query_rope=built.query_rope.float()).request(torch.empty(2, 4, 128))
    assert "takes bfloat16 query_rope, not torch.float32" in latent_cuda.refusal(request)


def test_the_kernel_follows_rows_and_format():
    def kernels(format: str, rows: list[int], *dims: int) -> list[str]:
        layout = PageLayout(LatentSpec.parse(format, *dims), 64)
        found = [config_for(layout, n, H200).kernel for n in rows]
        return [f"{Path(kernel.source).stem}{kernel.rows}" for kernel in found]

    expected = {1: "narrow16", 16: "narrow16", 17: "columns24", 24: "columns24", 25: "columns32", 32: "columns32"}
    for format in ("c1r6", "c4", "c4r8", "c4rfp8", "cfp8r8"):
        assert kernels(format, list(expected)) == list(expected.values())
        assert kernels(format, [33, 64, 65, 512]) == ["wide64"] * 4
        assert kernels(format, [16, 17, 40, 64], 320, 128) == ["narrow16", "columns24", "columns24", "columns32"]
    for format in ("c5", "c6r8", "c8r8"):
        assert kernels(format, [16, 24, 48, 64]) == ["narrow16", "columns24", "columns24", "columns32"]
    assert kernels("c4", [16, 17, 64], 64, 128) == ["narrow16"] * 3


def test_every_format_fits_a_hopper_device():
    latents, ropes = ["1", "2", "3", "4", "5", "6", "7", "8", "fp8"], ["", "r6", "r7", "r8", "rfp8"]
    for latent, rope, dim, rope_dim in product(latents, ropes, range(64, 513, 64), (32, 64, 128)):
        layout = PageLayout(LatentSpec.parse(f"c{latent}{rope}", dim, rope_dim), 64)
        assert all(config_for(layout, rows, H200).shared <= H200.shared_of_block for rows in (16, 32, 64))


def test_a_device_with_too_little_shared_memory_is_named():
    layout = PageLayout(LatentSpec.parse("c4"), 64)
    with pytest.raises(UnsupportedError, match="take more than the 65536 bytes of shared memory"):
        config_for(layout, 16, replace(H200, shared_of_block=65536))


def test_the_workspace_suffices_whatever_the_lengths():
    for format, heads, queries, batch in product(("c4", "c6r8"), (8, 128), (1, 3), (1, 3, 300)):
        layout = PageLayout(LatentSpec.parse(format), 64)
        need = latent_cuda.workspace_bytes(layout, batch * queries, batch, heads, queries, H200)
        for fewer in range(1, queries + 1):
            config = config_for(layout, heads * fewer, H200)
            assert config.partial_rows(heads * fewer, batch) * (2 * 512 + 8) < need
    assert latent_cuda.workspace_bytes(PageLayout(LatentSpec.parse("craw"), 64), 1, 1, 128, 1, H200) == 0


@pytest.mark.parametrize("format", sample(["c4", "c4r8", "c6r8"], 3))  # the next two tests compile the other kernels
def test_it_compiles(format):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout = PageLayout(LatentSpec.parse(format), 64)
    config, bf16 = config_for(layout, {"c4": 16, "c4r8": 64, "c6r8": 32}[format], H200), torch.bfloat16
    defines = latent_cuda.kernel_defines(layout, config, bf16, bf16, bf16)
    assert compile_kernels(config.kernel.source, defines, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("format", "rows"), sample([("c4", True), ("c4r8", False), ("c4", False), ("cfp8r8", False)], 4)
)
def test_products_do_not_wait_for_one_another(format, rows):
    """With too few registers, the compiler silently serialises wgmmas with waits."""
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("triton")
    layout = PageLayout(LatentSpec.parse(format), 64, rows)
    config, bf16 = config_for(layout, 64, H200), torch.bfloat16
    defines = latent_cuda.kernel_defines(layout, config, bf16, bf16, bf16)
    code = compile_kernels(config.kernel.source, defines, "sm_90a")
    lines = sass.instructions(code)
    products, waits = (sum(name in line for line in lines) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert products > 64
    assert waits < products // 8


@pytest.mark.parametrize(("format", "rows", "spilled"), sample([("c4", 32, 0), ("c4r8", 24, 0), ("c6r8", 24, 0)], 3))
def test_rows_as_columns_stay_in_registers(format, rows, spilled):
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("triton")
    layout = PageLayout(LatentSpec.parse(format), 64)
    config, bf16 = config_for(layout, rows, H200), torch.bfloat16
    code = compile_kernels(config.kernel.source, latent_cuda.kernel_defines(layout, config, bf16, bf16, bf16), "sm_90a")
    lines = sass.instructions(code)
    products, waits = (sum(name in line for line in lines) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert products == 4 + 32 + 16  # for rope parts, latents and values
    assert waits <= 16  # one per group of slices unpacked together
    assert cubin.resources(code)["attend"].local_bytes <= spilled


# -- on a GPU ----------------------------------------------------------------------------------------------------------

BIG = Case(latent_dim=512, rope_dim=64, heads=16, lens=(3000, 64, 700), queries=(1, 1, 1), page=64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *EMULATED,
        *(replace(BIG, heads=heads, format=f) for heads in (8, 16, 20, 32, 64, 128) for f in ("c4", "c4r8", "c6r8")),
        replace(BIG, queries=(4, 4, 4)),
        replace(BIG, page=16, lens=(40000,), queries=(1,)),
        replace(BIG, heavy=True),
    ],
    ids=str,
)
def test_attend_on_a_gpu(case, device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs Hopper")
    built = build(case, device)
    out = torch.full((*built.query_latent.shape[:2], case.latent_dim), torch.nan, dtype=DTYPES[case.out_dtype])
    lse = torch.full(built.query_latent.shape[:2], torch.nan, device=device)
    out = out.to(device)
    built.attend(out=out, lse=lse, backend="cuda")
    check(built, out, lse, 2e-2 if case.out_dtype == "bf16" else 5e-3)


@pytest.mark.gpu
def test_verification_equals_one_by_one_on_a_gpu(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs Hopper")
    together = build(replace(BIG, lens=(3000,), queries=(4,)), device)
    out = together.attend(backend="cuda").float()
    for i in range(4):
        alone = replace(
            together, case=replace(together.case, queries=(1,)), seq_lens=together.seq_lens - 3 + i,
            starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
            query_latent=together.query_latent[i : i + 1], query_rope=together.query_rope[i : i + 1],
        )  # fmt: skip
        torch.testing.assert_close(alone.attend(backend="cuda")[0].float(), out[i], atol=1e-2, rtol=0)
