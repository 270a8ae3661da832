"""Prefill in CUDA that unpacks pages during attention: in the same thread block (fused), or for later ones (ahead)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import build
from test_attention import check_rows, poisoned_out, request_of
from test_prefill_cuda import BIG, CPU, FEW, LONG, attend_and_check, config_of, emulated, launch

from slimkv.ops.attention.cuda import prefill as prefill_cuda
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.attention.cuda.prefill_config import AHEAD, FUSED
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import record_of
from slimkv.spec import CodecSpec, PageLayout
from tail import sample

FUSED_CASES = [
    LONG,
    *(replace(FEW, format=f) for f in ("k5v6", "fp8", "ku8vur3")),
    replace(FEW, dim=80, format="k2v3", dtype="fp32", out_dtype="bf16", scale=-0.2, strided=True),
    replace(FEW, dim=96, window=20, sinks=True, softcap=3.0),
    replace(FEW, dim=112, format="k8vu4", causal=False),
    *(replace(FEW, dim=dim) for dim in (128, 192, 256)),
    replace(LONG, window=100, softcap=2.0),
    replace(LONG, lens=(33, 300, 0, 128), queries=(33, 33, 40, 100), num_kv_heads=2, group=3, page=64),
    replace(FEW, format="k1v3", value_norm=1e-6, dtype="fp32"),
    replace(FEW, key_norm=1e3, query_norm=0.5, peaked=True),
]


@emulated
@pytest.mark.parametrize("case", sample(FUSED_CASES, 4), ids=str)
def test_attend_fused(case):
    """One or two producer warpgroups, which unpack, and two consumer warpgroups."""
    attend_and_check(case, config=config_of(case.format, case.dim, FUSED))


WIDE = [
    replace(FEW, dim=128, lens=(190,), queries=(140,)),  # blocks of 256 and of 24 rows
    replace(FEW, dim=128, format="kur4vu2", lens=(150,), queries=(100,), window=20, sinks=True, softcap=3.0),
    replace(LONG, dim=96, lens=(33, 300, 0, 100), queries=(33, 60, 40, 100), num_kv_heads=2, group=3, page=64),
    replace(FEW, dim=80, format="k8v5", queries=(90,), causal=False, dtype="fp32", strided=True),
    replace(FEW, dim=64, lens=(200,), queries=(150,), key_norm=1e3, query_norm=0.5, peaked=True),
]


@emulated
@pytest.mark.parametrize("case", sample(WIDE, 3), ids=str)
def test_attend_fused_with_two_blocks_of_rows(case):
    config = config_of(case.format, case.dim, FUSED, -1)
    assert config.row_blocks == 2
    attend_and_check(case, config=config)


SPLIT = replace(LONG, lens=(1300, 7, 2000, 0), queries=(40, 1, 33, 35))
SPLIT_CASES = [
    (replace(SPLIT, num_kv_heads=2), 0, 20),
    (replace(SPLIT, window=900, sinks=True, softcap=3.0), 0, 20),
    (replace(SPLIT, lens=(3000, *[5] * 40, 1700), queries=(140, *[1] * 40, 66), group=3), -1, 20),
    (replace(FEW, dim=128, format="ku8vur3", lens=(1500,), queries=(85,)), -1, 20),  # 170 rows: three blocks of 64
    (replace(FEW, dim=112, lens=(1100,), sinks=True, causal=False, strided=True), 0, 2),
    (replace(FEW, dim=256, lens=(1100,), key_norm=1e3, query_norm=0.5, peaked=True), 0, 4),
]


@emulated
@pytest.mark.parametrize(("case", "at", "blocks"), sample(SPLIT_CASES, 2), ids=str)
def test_fused_blocks_share_the_keys_of_few_sequences(case, at, blocks, monkeypatch):
    monkeypatch.setattr(prefill_config, "device_of", lambda device: record_of((9, 0), blocks))
    monkeypatch.setattr(prefill_cuda, "device_of", lambda device: SimpleNamespace(multiprocessors=blocks))
    seen = []

    def noting(source, name, defines, grid, threads, shared, args):
        seen.append((name, grid[0]))
        launch(source, name, defines, grid, threads, shared, args)

    attend_and_check(case, launch=noting, config=config_of(case.format, case.dim, FUSED, at))
    assert seen == [("attend", blocks), ("merge", blocks)]


@emulated
def test_attend_fused_one_tile_of_pages_at_a_time():
    attend_and_check(replace(FEW, lens=(420,)), config=replace(config_of("k4v4", 64, FUSED), packed_stages=1))


@emulated
def test_attend_fused_with_one_producer():
    config = replace(config_of("k4v4", 64, FUSED), producers=1, producer_registers=88)
    attend_and_check(replace(FEW, lens=(420,)), config=config)


MANY = replace(LONG, lens=(300, 7, 140, 260), queries=(200, 1, 33, 65), num_kv_heads=2)
AHEAD_CASES = [
    replace(MANY, dim=128),
    replace(MANY, dim=80, format="k5vu4", window=60, sinks=True, page=32),
    replace(MANY, dim=96, format="k2v8", causal=False, softcap=3.0),
    replace(MANY, dim=112, format="kur4vfp8", lens=(0, 33, 300, 129), queries=(40, 33, 33, 100), group=3, page=128),
]


@emulated
@pytest.mark.parametrize("room", [prefill_cuda.WORKSPACE_BYTES, 1], ids=["all", "ring"])
@pytest.mark.parametrize("case", sample(AHEAD_CASES, 4), ids=str)
def test_attend_ahead(case, room):
    """Thread blocks unpack for later ones, with a workspace for everything or of the minimum size."""
    cuts = []

    def noting(source, name, defines, grid, threads, shared, args):
        cuts.append((args.lead, args.slots))
        launch(source, name, defines, grid, threads, shared, args)

    attend_and_check(case, launch=noting, budget=room, config=config_of(case.format, case.dim, AHEAD))
    lead, slots = cuts[0]
    assert len(cuts) == 2
    assert slots == (2 * len(case.lens) if room > 1 else lead + 1)
    assert lead < 5, "all is unpacked before the first block"


@emulated
def test_fewer_queries_than_decode_takes():
    """Sequences of 17 queries and more can use this kernel; the others are unchanged."""
    case = replace(LONG, lens=(100, 40, 60), queries=(20, 16, 17))
    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    request = request_of(built, out, lse)
    prefill_cuda.attend_prefill(request, launch, config=config_of("k4v4", 64, FUSED), most_queries=16)
    check_rows(built, out, lse, lambda count: count > 16)


UNPACKING = PageLayout(CodecSpec.parse("k5vu4", 96), 16)


@pytest.mark.parametrize(
    "config", sample((config_of("k5vu4", 96, AHEAD), *prefill_config.configs(UNPACKING.spec, FUSED)), 2), ids=str
)
def test_it_compiles_with_warps_that_unpack(config):
    pytest.importorskip("cuda.bindings.nvrtc")
    defines = prefill_defines.attend_defines(UNPACKING, config, 1, 1, True, True)
    assert compile_kernels(prefill_cuda.ATTEND, defines, "sm_90a")[:4] == b"\x7fELF"


FUSED_ON_A_GPU = [
    *(replace(BIG, dim=dim) for dim in (64, 80, 96, 112, 128)),
    *(replace(BIG, dim=dim, lens=(700, 40, 128), queries=(300, 7, 33)) for dim in (192, 256)),
    replace(BIG, window=300, softcap=3.0, sinks=True),
    replace(BIG, dim=96, causal=False, strided=True, padding=9, slack=True),
    *(replace(LONG, dim=128, format=f) for f in ("k2v3", "k5v6", "k8v8", "fp8", "ku2vur8", "turboquant_k8v4")),
    *(replace(LONG, value_norm=norm, dtype="fp32") for norm in (1e-6, 1e5)),
    replace(LONG, key_norm=1e3, query_norm=0.25, peaked=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", FUSED_ON_A_GPU, ids=str)
def test_attend_fused_on_a_gpu(case, hopper):
    launch = prefill_cuda.launcher(hopper)
    for config in prefill_config.configs(CodecSpec.parse(case.format, case.dim), FUSED):
        got = attend_and_check(case, hopper, launch, config=config)
        again = attend_and_check(case, hopper, launch, config=config)
        assert torch.equal(got.nan_to_num(), again.nan_to_num()), "not the same bits again"


AHEAD_ON_A_GPU = [
    *(replace(BIG, dim=dim) for dim in (80, 96, 112, 128)),
    *(replace(BIG, group=group) for group in (1, 3, 8)),
    replace(BIG, num_kv_heads=8, lens=(1700, 40, 900, 128, 2500, 700) * 3, queries=(700, 7, 500, 33, 128, 300) * 3),
    replace(BIG, window=300, softcap=3.0, sinks=True),
    *(replace(BIG, format=f) for f in ("k2v3", "k5v6", "k8v8", "fp8", "ku2vur8", "turboquant_k8v4")),
    replace(BIG, dim=96, causal=False, strided=True, padding=9, slack=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("room", [prefill_cuda.WORKSPACE_BYTES, 1], ids=["all", "ring"])
@pytest.mark.parametrize("case", AHEAD_ON_A_GPU, ids=str)
def test_attend_ahead_on_a_gpu(case, room, hopper, monkeypatch):
    """With few multiprocessors, little is unpacked in advance, so that thread blocks unpack most tiles."""
    monkeypatch.setattr(prefill_cuda, "device_of", lambda device: SimpleNamespace(multiprocessors=8))
    launch, config = prefill_cuda.launcher(hopper), config_of(case.format, case.dim, AHEAD)
    got = attend_and_check(case, hopper, launch, room, config)
    again = attend_and_check(case, hopper, launch, room, config)
    assert torch.equal(got.nan_to_num(), again.nan_to_num()), "not the same bits again"
