"""Prefill in CUDA, compared with exact attention in float64: emulated on a CPU, and on a GPU if available."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import host
import pytest
import torch
from attention_cases import Case, build
from test_attention import check, check_rows, poisoned_out, request_of

from slimkv import ops
from slimkv.ops.attention.api import MAX_DECODE_QUERIES
from slimkv.ops.attention.cuda import decode as decode_cuda
from slimkv.ops.attention.cuda import prefill as prefill_cuda
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.attention.cuda.prefill_config import AHEAD, FIRST, FUSED
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import NAMED, record_of
from slimkv.spec import CodecSpec, PageLayout
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")


def launch(source, name, defines, grid, threads, shared, args) -> None:
    host.launch(host.compile(Path(source), defines), name, grid=grid, threads=threads, shared=shared, args=args)


def config_of(format: str, dim: int, unpack=FIRST, at: int = 0) -> prefill_defines.PrefillConfig:
    return prefill_config.configs(CodecSpec.parse(format, dim), unpack)[at]


def attend_and_check(
    case: Case, device: torch.device = CPU, launch=launch, budget: int = prefill_cuda.WORKSPACE_BYTES, config=None
) -> torch.Tensor:
    """Attends the prefilled sequences and compares them. Rows of other sequences must be unchanged."""
    built = build(case, device)
    out, lse = poisoned_out(case, built)
    request = request_of(built, out, lse)
    assert prefill_config.refusal(request) is None
    config = config or config_of(case.format, case.dim)
    request.run(SimpleNamespace(run=lambda request: prefill_cuda.attend_prefill(request, launch, budget, config)))
    check_rows(built, out, lse, lambda count: count > MAX_DECODE_QUERIES)  # shorter ones are decoded
    return out


LONG = Case(query_norm=0.5, num_kv_heads=1, group=2, lens=(300, 7, 140), queries=(40, 1, 33))
EMULATED = [
    LONG,
    *(
        replace(LONG, format=f)
        for f in (
            "k1v1",
            "k2v3",
            "k5v6",
            "k7v2",
            "k8v8",
            "fp8",
            "ku2vu3",
            "kur4vu7",
            "turboquant_4bit_nc",
            "turboquant_k8v4",
        )
    ),
    *(replace(LONG, dim=128, format=f) for f in ("k4v4", "k3v8", "ku8vur3", "k6vfp8")),
    *(replace(LONG, group=group) for group in (1, 3, 6, 64)),
    *(replace(LONG, dim=256, lens=(150,), queries=(34,), softcap=cap) for cap in (0.0, 3.0)),
    *(replace(LONG, dim=dim, format=f) for dim, f in ((80, "k5v4"), (96, "k4v4"), (112, "ku4v8"), (192, "k3vu4"))),
    replace(LONG, softcap=2.0, window=100, sinks=True),
    *(replace(LONG, page=page) for page in (32, 128)),
    *(
        replace(LONG, **{k: v})
        for k, v in (("window", 5), ("window", 200), ("causal", False), ("scale", -0.3), ("sinks", True))
    ),
    *(replace(LONG, dtype=d, out_dtype=o) for d, o in (("fp16", "fp16"), ("fp32", "bf16"), ("bf16", "bf16"))),
    replace(LONG, strided=True, out_dtype="bf16", padding=5, slack=True),
    *(replace(LONG, format="turboquant_k8v4", dim=128, dtype=d, strided=True) for d in ("bf16", "fp16", "fp32")),
    replace(LONG, lens=(33, 300, 0, 128, 257), queries=(33, 33, 40, 100, 257), num_kv_heads=2),
    replace(LONG, lens=(0, 0), queries=(40, 40), sinks=True),
    replace(LONG, value_norm=1e-6, dtype="fp32"),
    replace(LONG, value_norm=1e5, dtype="fp32"),
    replace(LONG, key_norm=1e3, query_norm=0.5, peaked=True),
]


@emulated
@pytest.mark.parametrize("case", sample(EMULATED, 4), ids=str)
def test_attend(case):
    attend_and_check(case)


FEW = replace(LONG, lens=(150,), queries=(34,))
# A common vector of norm 1000 was subtracted from the keys. It shifts scores by about 6.
CENTRED = replace(FEW, key_norm=8.0, query_norm=0.05, dtype="fp32", offset_norm=1000.0)
SOFT_CAP = {"softcap": 6.0, "sinks": True}


@emulated
@pytest.mark.parametrize(
    ("options", "unpack", "at"),
    sample(
        [
            ({}, FIRST, 0),
            ({"sinks": True, "window": 100}, FIRST, 0),
            (SOFT_CAP, FIRST, 0),
            ({**SOFT_CAP, "dim": 80}, FIRST, 0),
            (SOFT_CAP, FUSED, 0),
            ({**SOFT_CAP, "lens": (200,), "queries": (150,)}, FUSED, -1),
            ({**SOFT_CAP, "dim": 128, "lens": (300, 140), "queries": (40, 33)}, AHEAD, 0),
        ],
        2,
    ),
    ids=["plain", "sinks", "softcap", "dim_80", "fused", "wide", "ahead"],
)
def test_centred_keys(options, unpack, at):
    case = replace(CENTRED, **options)
    attend_and_check(case, config=config_of(case.format, case.dim, unpack, at))


@emulated
def test_centred_keys_in_passes():
    case = replace(CENTRED, **SOFT_CAP, lens=(300,), queries=(40,))
    attend_and_check(case, budget=4 * 128 * case.dim * 2)


@emulated
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"causal": False, "sinks": True}], ids=str)
def test_passes(options):
    """A workspace of one tile, and of two."""
    case = replace(LONG, **options, lens=(300, 7, 260), num_kv_heads=2)
    for tiles in (1, 2):
        attend_and_check(case, budget=4 * tiles * 128 * case.dim * 2 * case.num_kv_heads)


WINDOWED = replace(LONG, lens=(1500, 900, 60), queries=(40, 33, 60), window=150)


@emulated
@pytest.mark.parametrize(
    ("change", "unpack", "budget"),
    [
        ({}, FIRST, prefill_cuda.WORKSPACE_BYTES),
        ({"softcap": 3.0, "sinks": True, "page": 64}, FIRST, prefill_cuda.WORKSPACE_BYTES),
        ({"dim": 256, "lens": (700,), "queries": (40,)}, FIRST, prefill_cuda.WORKSPACE_BYTES),
        ({}, FIRST, 1),  # a tile at a time
        ({"dim": 80}, AHEAD, prefill_cuda.WORKSPACE_BYTES),
        ({"dim": 80}, AHEAD, 1),
    ],
    ids=["first", "options", "dim_256", "passes", "ahead", "ring"],
)
def test_only_tokens_in_some_window_are_unpacked(change, unpack, budget):
    """The number of unpacked tiles does not depend on the context length."""
    case, tiles = replace(WINDOWED, **change), 0
    config = config_of(case.format, case.dim, unpack)

    def counting(source, name, defines, grid, threads, shared, args):
        nonlocal tiles
        if name == "unpack":
            tiles += args.tiles
        elif unpack == AHEAD:
            tiles = args.tiles
        launch(source, name, defines, grid, threads, shared, args)

    attend_and_check(case, launch=counting, budget=budget, config=config)
    seen = max(case.queries) + case.window - 1
    assert 0 < tiles <= -(-(seen - 1) // config.tile_tokens) + 1
    assert tiles * config.tile_tokens < max(case.lens) / 2


@emulated
def test_passes_over_sequences():
    """A workspace for one whole sequence. A sequence that is not prefilled is between two that are."""
    case = replace(LONG, lens=(150, 7, 130), queries=(33, 1, 40), num_kv_heads=4)
    attend_and_check(case, budget=4 * 2 * 128 * case.dim * case.num_kv_heads)


@emulated
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(
    ("format", "dim", "unpack"),
    [("kur4vu4", 64, FIRST), ("k4v4", 64, FUSED), ("k4v4", 80, AHEAD)],
    ids=["unpacked", "fused", "ahead"],
)
def test_a_marked_token_gives_nan_to_who_sees_it_only(side, format, dim, unpack):
    built = build(replace(LONG, dim=dim, format=format), CPU)
    block, place = divmod(int(built.positions(0)[280]), built.layout.block_size)  # the token of query 20 of 40
    field = getattr(built.layout, side).field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF
    out, lse = poisoned_out(built.case, built)
    prefill_cuda.attend_prefill(request_of(built, out, lse), launch, config=config_of(format, dim, unpack))
    assert out[20:40].isnan().all()
    assert out[:20].isfinite().all()
    assert out[41:].isfinite().all()


@emulated
@pytest.mark.parametrize(
    ("format", "softcap", "unpack"),
    [
        *((f, cap, FIRST) for f, cap in (("k4v4", 0.0), ("kur4vu4", 20.0), ("fp8", 0.0))),
        *((f, 0.0, FUSED) for f in ("k4v4", "kur4vu4")),
    ],
    ids=["k4v4", "uniform", "fp8", "k4v4-fused", "uniform-fused"],
)
@pytest.mark.parametrize("poison", [0xFF, 0xF0])  # invalid scales, and large ones
def test_what_no_query_sees_changes_no_bit(format, softcap, unpack, poison):
    """Not even through the power of two that all tokens of a tile share as a unit."""
    case = replace(LONG, format=format, softcap=softcap, window=9, lens=(140,), queries=(33,))
    outs = []
    for poisoned in (False, True):
        built = build(case, CPU)
        if poisoned:
            built.poison(built.positions(0)[: 140 - 33 - 9 + 1], poison)
        out, lse = poisoned_out(case, built)
        prefill_cuda.attend_prefill(request_of(built, out, lse), launch, config=config_of(format, 64, unpack))
        outs.append(out)
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(LONG, format="krawbf16v4"), "key format rawbf16 is not unpacked"),
        (replace(LONG, dim=48), "head sizes 48/48 are not"),
        (replace(LONG, dim=128, value_dim=64), "head sizes 128/64 are not"),
        (replace(LONG, group=65), "65 query heads per KV head are more than 64"),
        (replace(LONG, fresh=True), "fresh K and V"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    assert reason in prefill_config.refusal(request_of(built, *poisoned_out(case, built)))


WARP_CASES = [
    replace(FEW, dim=64, lens=(300, 7, 200), queries=(90, 1, 33)),
    replace(FEW, dim=128, lens=(190,), queries=(140,)),  # blocks of 128 and of 24 rows
    replace(FEW, dim=80, format="k5v4", dtype="fp32", strided=True, out_dtype="bf16", scale=-0.2),
    replace(FEW, dim=96, format="kur4vu2", window=20, sinks=True, softcap=3.0),
    replace(FEW, dim=112, format="fp8", causal=False, group=3),
    replace(FEW, dim=192, format="k3vu4", queries=(70,)),
    replace(FEW, dim=256, window=60, lens=(150, 400), queries=(34, 70), num_kv_heads=2),
    replace(FEW, dim=64, lens=(200, 0), queries=(150, 40), key_norm=1e3, query_norm=0.5, peaked=True, sinks=True),
    replace(CENTRED, **SOFT_CAP, dim=64),
]


@emulated
@pytest.mark.parametrize(
    ("case", "config"),
    sample(
        (
            (case, config)
            for case in WARP_CASES
            for config in prefill_config.configs(CodecSpec.parse("k4v4", case.dim), FIRST, single_warps=True)
        ),
        4,
    ),
    ids=str,
)
def test_attend_with_products_of_single_warps(case, config):
    attend_and_check(case, config=config)
    tile = 2 * config.tile_bytes(case.dim) * case.num_kv_heads
    attend_and_check(case, config=config, budget=2 * tile)  # the state of two row blocks is kept between passes


@emulated
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dim", sample([192, 256], 2))
def test_a_warpgroup_that_lags(dim, which, monkeypatch):
    """With queries in registers, a finished warpgroup's output takes the memory of tiles that the other still reads."""
    monkeypatch.setenv(host.LAG, f"4,{which}")
    case = replace(LONG, dim=dim, group=4, lens=(300, 140), queries=(70, 33))
    attend_and_check(case, config=prefill_config.warp_config(case.spec, record_of(NAMED["rtx4090"], 2)))


def test_products_of_single_warps_fit_every_device():
    for dim in prefill_config.HEAD_DIMS:
        spec = CodecSpec.parse("k4v4", dim)
        for name, capability in NAMED.items():
            record = record_of(capability, 100)
            config = prefill_config.warp_config(spec, record)
            assert prefill_defines.shared_bytes(spec, config) <= record.shared_of_block, (name, dim)
            assert config.blocks_per_sm * config.threads >= 256, "too few warps to hide anything"


@pytest.mark.parametrize("dim", sample([128, 64, 256], 3))
def test_it_compiles(dim):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout, config = PageLayout(CodecSpec.parse("k4v4", dim), 16), config_of("k4v4", dim)
    to_attend = prefill_defines.attend_defines(layout, config, 1, 1, True, True, True)
    assert compile_kernels(prefill_cuda.ATTEND, to_attend, "sm_90a")[:4] == b"\x7fELF"
    to_unpack = prefill_defines.unpack_defines(layout, config)
    assert compile_kernels(prefill_cuda.UNPACK, to_unpack, "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("format", ["k4v4", "ku4vur4", "k7v8"])
def test_shared_memory_fits_hopper(format):
    """Every configuration fits, and each kind has one, except for wide codes at large head sizes."""
    for dim in prefill_config.HEAD_DIMS:
        layout = PageLayout(CodecSpec.parse(format, dim), 16)
        found = [config for unpack in prefill_config.Unpack for config in prefill_config.configs(layout.spec, unpack)]
        for config in found:
            shared = prefill_defines.attend_defines(layout, config, 1, 1, False, False)["SHARED"]
            assert shared <= prefill_defines.SHARED_OF_BLOCK
        fused = sum(config.fused for config in found)
        assert format == "k7v8" or fused == (2 if dim <= 128 else 1)


BIG = replace(
    LONG, dim=128, num_kv_heads=4, group=4, lens=(1700, 40, 900, 128), queries=(700, 7, 900, 33), out_dtype="bf16"
)
ON_A_GPU = [
    BIG,
    replace(BIG, dim=64),
    *(replace(BIG, group=group) for group in (1, 3, 8, 64)),
    *(replace(BIG, **{k: v}) for k, v in (("window", 300), ("causal", False), ("scale", -0.05), ("page", 128))),
    replace(LONG, dim=128, dtype="fp16", out_dtype="fp32", strided=True, padding=9, slack=True),
    replace(BIG, dtype="fp32", strided=True),
    replace(BIG, lens=(0, 300, 33), queries=(40, 300, 33), sinks=True),
    *(
        replace(LONG, dim=128, format=f)
        for f in ("k2v3", "k5v6", "k8v8", "fp8", "ku2vur8", "turboquant_4bit_nc", "turboquant_k8v4")
    ),
    replace(LONG, value_norm=1e-6, dtype="fp32"),
    replace(LONG, value_norm=1e5, dtype="fp32"),
    replace(LONG, key_norm=1e3, query_norm=0.25, peaked=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_attend_on_a_gpu(case, hopper):
    launch = prefill_cuda.launcher(hopper)
    got = attend_and_check(case, hopper, launch)
    assert torch.equal(got.nan_to_num(), attend_and_check(case, hopper, launch).nan_to_num()), "not the same bits again"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"causal": False, "sinks": True}], ids=str)
def test_passes_on_a_gpu(options, hopper):
    case = replace(BIG, **options)
    tile = 4 * config_of(case.format, 128).tile_tokens * 128 * 4 * case.num_kv_heads
    for tiles in (1, 3):
        attend_and_check(case, hopper, prefill_cuda.launcher(hopper), tiles * tile)


@pytest.mark.gpu
def test_it_is_what_hopper_gets_by_default(hopper, monkeypatch):
    seen = []

    def noting(request, launch, **options):
        seen.append(request)
        return attend_prefill(request, launch, **options)

    attend_prefill = prefill_cuda.attend_prefill
    monkeypatch.setattr(prefill_cuda, "attend_prefill", noting)
    check(BIG, hopper, backend="cuda")
    assert len(seen) == 1
    check(replace(BIG, softcap=2.0), hopper, backend="cuda")
    assert len(seen) == 2
    check(replace(BIG, dim=96), hopper, backend="cuda")
    assert len(seen) == 3
    check(replace(BIG, dim=48), hopper, backend="cuda")  # by the Triton kernels
    assert len(seen) == 3


@pytest.mark.gpu
def test_nothing_is_launched_for_short_sequences_where_there_are_none(hopper, monkeypatch):
    seen = []

    def noting(*args):
        seen.append(args)
        return attend_packed(*args)

    attend_packed = decode_cuda.attend_packed
    monkeypatch.setattr(decode_cuda, "attend_packed", noting)
    built = build(replace(BIG, lens=(700, 300), queries=(300, 33)), hopper)
    known = ops.attend(**built.arguments(), backend="cuda")
    assert not seen
    unknown = ops.attend(**built.arguments(min_query_len=0), backend="cuda")
    assert len(seen) == 1
    assert torch.equal(known, unknown)
    check(replace(BIG, lens=(700, 300), queries=(300, 32)), hopper, backend="cuda")
    assert len(seen) == 2
