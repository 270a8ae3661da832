"""CUDA attend against the definition in float64: lane by lane on a CPU, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host
import pytest
import torch
from attention_cases import Built, Case, build
from test_attention import DECODE, EVERYTHING, MATRIX, check, check_rows, poisoned_out, request_of

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.attention.api import MAX_DECODE_QUERIES
from slimkv.ops.attention.cuda import decode as attend_cuda
from slimkv.ops.attention.cuda import shape
from slimkv.ops.attention.cuda.decode_defines import kernel_defines
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.spec import CodecSpec, Kind, PageLayout

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")
SMALL_GPU = shape.Device(multiprocessors=3, shared_of_multiprocessor=233472, shared_of_block=232448, copy_engine=True)
OLD_GPU = shape.Device(multiprocessors=2, shared_of_multiprocessor=102400, shared_of_block=101376)


def launch(name, defines, grid, threads, shared, args, overlap) -> None:
    host.launch(
        host.compile(Path(attend_cuda.SOURCE), defines), name, grid=grid, threads=threads, shared=shared, args=args
    )


def run_emulated(case: Case, device=SMALL_GPU) -> tuple[Built, torch.Tensor, torch.Tensor]:
    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    request = request_of(built, out, lse)
    assert attend_cuda.supports(request) is None
    attend_cuda.attend_packed(request, device, launch)
    return built, out, lse


def check_emulated(case: Case, device=SMALL_GPU) -> None:
    built, out, lse = run_emulated(case, device)
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)  # longer sequences are the prefill kernel's


TINY = replace(DECODE, num_kv_heads=1, lens=(137, 9), queries=(1, 1))
VERIFY = replace(TINY, lens=(70, 5, 0, 17), queries=(5, 2, 1, 3))
EMULATED = [
    *(replace(TINY, format=f) for f in ("k1v1", "k2v3", "k4v4", "k5v6", "k7v2", "k8v8", "fp8", "ku2vu3", "kur4vu7")),
    *(
        replace(VERIFY, format=f)
        for f in ("k4v4", "k3v2", "turboquant_4bit_nc", "turboquant_k8v4", "k6vfp8", "ku8vur3")
    ),
    *(replace(TINY, dim=dim, format=f) for dim, f in ((16, "k4v4"), (80, "k3v5"), (96, "k1v2"), (128, "k4v4"))),
    replace(TINY, dim=112, format="k1v7"),
    replace(TINY, dim=256, format="k4v3", lens=(40,), queries=(1,)),
    replace(VERIFY, dim=192, value_dim=128),
    replace(TINY, dim=256, group=16, lens=(40,), queries=(1,)),
    *(replace(TINY, group=group) for group in (1, 3, 6, 8, 16, 20)),
    *(replace(TINY, page=page, lens=(2 * page + 3, page, 60), queries=(1, 1, 1)) for page in (32, 128)),
    *(replace(VERIFY, **{k: v}) for k, v in (("window", 5), ("softcap", 2.5), ("causal", False), ("scale", -0.3))),
    replace(VERIFY, **EVERYTHING),
    replace(TINY, **EVERYTHING, lens=(700, 60)),
    replace(TINY, lens=(70, 20, 33, 0, 41), queries=(36, 1, 4, 1, 41)),
    replace(TINY, lens=(30, 400, 0, 200, 7), queries=(5, 300, 1, 200, 7), padding=40),  # few of many rows are merged
    replace(TINY, lens=tuple(range(70)), queries=(1,) * 70),
    replace(TINY, lens=(0, 0), sinks=True),
    *(replace(case, query_norm=0.0) for case in (TINY, VERIFY)),  # a query of zeros sees every key alike
    *(replace(case, scale=0.0) for case in (TINY, VERIFY)),
    replace(TINY, value_norm=1e-6, dtype="fp32"),
    replace(VERIFY, value_norm=1e5, dtype="fp32", out_dtype="bf16"),
    replace(TINY, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"),
]


@emulated
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_attend(case):
    check_emulated(case)


LONG = replace(TINY, lens=(700, 90, 1), queries=(1, 1, 1))


LONG_CASES = [
    *(replace(LONG, format=f) for f in ("k4v4", "k2v2", "k1v3", "ku4vu4", "turboquant_k8v4")),
    *(replace(LONG, format=f) for f in ("k5v5", "k6v6", "k6v5", "k8v7")),
    *(replace(LONG, dim=128, format=f) for f in ("k4v4", "k2v2")),
    replace(LONG, page=32, format="k2v2"),
    *(
        replace(LONG, page=64, format=f, queries=q)
        for f in ("k4v4", "ku4vu8")
        for q in ((1, 1, 1), (4, 2, 1), (8, 6, 1))
    ),
    *(replace(LONG, page=page, format=f) for page, f in ((16, "k5v5"), (32, "k6v4"), (64, "k5v5"), (64, "k6v6"))),
    replace(LONG, **EVERYTHING, format="k2v2"),
    replace(LONG, queries=(4, 2, 1)),
    *(replace(LONG, group=8, format=f) for f in ("k4v4", "k5v3")),
    *(replace(LONG, format=f, queries=(8, 6, 1)) for f in ("k4v4", "k5v6", "k5v5", "k2vur8")),
    replace(LONG, dim=96, queries=(8, 6, 1), **EVERYTHING),
    replace(LONG, dim=128, format="k6v6"),
    replace(LONG, format="k6v6", dim=80),
    # Slices that are no whole words of a plane, and rotations without a free slot.
    *(replace(LONG, page=64, format=f, dim=dim) for dim in (80, 112) for f in ("k3v3", "k5v5", "k2v2")),
    *(replace(LONG, page=64, format=f, dim=96) for f in ("k3v5", "k7v1")),
    *(replace(LONG, page=64, format="k5v5", dim=dim) for dim in (16, 192)),
    *(replace(LONG, page=64, format="k1v1", dim=dim) for dim in (64, 80, 112, 128, 192)),
    replace(LONG, format="k3v5", dim=112, queries=(8, 6, 1)),
]


def choose_as_if_long(patch: pytest.MonkeyPatch) -> None:
    """More warps and larger steps, which the few tokens of a test would not choose."""
    scant = [name for name in vars(shape) if name.startswith(("_SCANT_", "_SPARSE_"))]
    for bound in ("_SHORT_BYTES", "_LITTLE_TOKENS", "_TINY_TOKENS", *scant):
        patch.setattr(shape, bound, 0)


@pytest.fixture
def as_if_long(monkeypatch):
    choose_as_if_long(monkeypatch)


@emulated
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_the_shapes_for_long_sequences(case, as_if_long):
    cut = shape.shape_on(SMALL_GPU, build(case, CPU).layout, case.group, max(case.queries), 700, 3)
    assert cut is not None
    assert cut.warps > 4
    check_emulated(case)


def polls(case: Case, rows: int) -> bool:
    """Whether the case's long work is merged while blocks still attend, if it has so many rows of output."""
    layout = build(case, CPU).layout
    cut = shape.shape_on(SMALL_GPU, layout, case.group, max(case.queries), 700, 3)
    assert cut is not None
    return shape.polls(SMALL_GPU, layout, cut, shape.rows_bound(rows), shape.amount_of(SMALL_GPU, layout, 700, 3))


def test_only_few_rows_wait_for_their_parts(as_if_long):
    assert polls(LONG, 12)  # so those of LONG_CASES, which are compared with the definition, do
    assert polls(LONG, 64)
    assert not polls(LONG, 65)


def test_little_work_does_not_wait_for_its_parts():
    assert not polls(LONG, 12)


# Many columns by teams of four warps, whose products are those of sm_90a: in pairs, a team for keys and one for values,
# or, of little work, each for both.
HOPPER_GPU = replace(SMALL_GPU, warpgroups=True)
NO_LENGTHS = {key: value for key, value in EVERYTHING.items() if key not in ("lens", "queries")}
# Query heads of a KV head, queries of a sequence, columns of a block.
GROUPS_QUERIES_COLUMNS = (
    *((2, 16, 32), (3, 16, 48), (5, 16, 40), (6, 16, 48), (7, 8, 56), (8, 8, 64)),
    *((12, 4, 48), (13, 4, 56), (16, 3, 48), (16, 4, 64)),
)
DRAFTS = replace(LONG, dim=128, lens=(700, 290, 33), queries=(8, 6, 8))
WARPGROUP_CASES = [
    *(replace(DRAFTS, format=f, page=page) for f, page in (("k4v4", 64), ("k5v6", 16), ("ku4vur8", 64))),
    replace(DRAFTS, dim=80, value_dim=64, **EVERYTHING),
    replace(DRAFTS, dim=64, group=32, num_kv_heads=2, lens=(33, 300, 40, 1, 70), queries=(1,) * 5),
    replace(DRAFTS, dim=64, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"),
    replace(DRAFTS, dim=64, page=128, lens=(1300, 40), queries=(8, 7)),
    *(replace(DRAFTS, format=f, page=64) for f in ("k5v5", "k4v3")),  # two of four parts of the values share a word
]


@emulated
@pytest.mark.parametrize("case", WARPGROUP_CASES, ids=str)
def test_products_of_warpgroups(case, as_if_long):
    cut = shape.shape_on(HOPPER_GPU, build(case, CPU).layout, case.group, max(case.queries), 700, 3)
    assert cut is not None
    assert cut.warpgroup
    assert cut.roles
    check_emulated(case, HOPPER_GPU)


# More columns than 32: as many of them as take the least time for all queries.
MANY = replace(DRAFTS, page=64, lens=(300, 150), queries=(16, 9))
RAGGED = replace(MANY, lens=(700, 33, 0, 290, 17), queries=(16, 1, 1, 11, 13))
COLUMN_CASES = [
    (replace(MANY, queries=(9, 3)), 40),
    (replace(MANY, queries=(12, 9)), 48),
    (replace(MANY, queries=(13, 2), page=16), 56),
    (MANY, 64),
    (replace(MANY, page=128, lens=(1300, 40), dim=64), 64),
    (replace(RAGGED, dim=64, num_kv_heads=2), 64),
    (replace(MANY, queries=(31, 20), dim=64), 64),  # twice
    *((replace(MANY, group=g, queries=(q, q - 1), dim=64), n) for g, q, n in GROUPS_QUERIES_COLUMNS),
    (replace(MANY, format="k5v5", queries=(12, 7)), 48),
    (replace(MANY, format="ku4vur8", queries=(16, 7)), 64),
    (replace(MANY, format="k6v3", queries=(9, 7)), 40),
    *((replace(MANY, **NO_LENGTHS, queries=(q, 5)), n) for q, n in ((10, 40), (16, 64))),
    (replace(MANY, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"), 64),
    (replace(MANY, causal=False, scale=-0.1, dim=64), 64),
    (replace(MANY, dim=256, queries=(8, 5)), 32),
    (replace(MANY, dim=192, queries=(16, 9), format="k5v4"), 32),
    (replace(MANY, dim=192, lens=(140,) * 5, queries=(8,) * 5), 32),  # most are whole in one block
]
# Value slices that four warps do not share evenly: the last ones have fewer or none. What fills no word of a plane is
# in rows of tokens, for one or two of the warps.
UNEVEN_CASES = [
    *((replace(MANY, dim=d, queries=(q, 3), page=page), n) for d, q, page, n in ((80, 5, 16, 32), (96, 12, 64, 48))),
    (replace(MANY, dim=112), 64),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k3v5"), (96, "k5v7"), (112, "k2v6"))),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k8v8"), (112, "k6v8"), (96, "ku4vur2"))),
    (replace(MANY, dim=112, queries=(9, 7), format="k5v5", page=16), 40),
    (replace(MANY, dim=80, queries=(13, 2), format="k4v1"), 56),
    (replace(MANY, dim=112, **NO_LENGTHS, queries=(9, 5), format="k4v3"), 40),
    (replace(RAGGED, dim=96, num_kv_heads=2, format="k1v4"), 64),
    (replace(MANY, dim=80, lens=(140,) * 5, queries=(8,) * 5), 32),  # most are whole in one block
    (replace(MANY, dim=80, value_dim=112, queries=(8, 5), sinks=True), 32),
    (replace(MANY, dim=128, value_dim=80, queries=(8, 5), format="k4v2"), 32),
    (replace(MANY, dim=64, value_dim=48, queries=(8, 5), format="k4v3"), 32),
    (replace(MANY, dim=160, queries=(8, 5)), 32),
]


@emulated
@pytest.mark.parametrize(("case", "columns"), [*COLUMN_CASES, *UNEVEN_CASES], ids=str)
def test_more_columns_than_32(case, columns, as_if_long):
    cut = shape.shape_on(HOPPER_GPU, build(case, CPU).layout, case.group, max(case.queries), 700, 3)
    assert cut is not None
    assert cut.roles
    assert cut.columns == columns
    check_emulated(case, HOPPER_GPU)


@pytest.mark.parametrize(
    ("longest", "total", "columns"), [(16, 48, 64), (16, 25, 64), (16, 24, 32), (12, 36, 48), (40, 300, 32)]
)
def test_one_long_draft_or_prompt_does_not_widen_the_columns_of_all(longest, total, columns, as_if_long):
    """Of three sequences with ``total`` queries together."""
    built, found = build(replace(MANY, lens=(700,) * 3, queries=(16,) * 3), CPU), []
    out, lse = poisoned_out(built.case, built)
    request = request_of(built, out, lse)
    query = torch.empty(1).expand(total, *request.query.shape[1:])
    request = replace(request, query=query, max_query_len=longest)
    attend_cuda.attend_packed(request, HOPPER_GPU, lambda name, defines, *_: found.append(8 * defines["NG"]), 32)
    assert found[0] == columns


@pytest.mark.parametrize(
    ("dim", "group", "queries", "sequences", "tokens", "columns"),
    [
        *((128, 4, q, 4, 4096, 16) for q in (5, 8, 16)),
        *((dim, 4, 8, 4, 8192, n) for dim, n in ((128, 32), (112, 16), (96, 16), (80, 16), (64, 16))),
        *((dim, 4, 16, 16, 2048, n) for dim, n in ((128, 64), (112, 64), (80, 16))),  # a block each
        (128, 9, 4, 4, 4096, 40),  # of 16 columns 7 would do nothing
        (128, 32, 1, 4, 4096, 32),
        (256, 4, 8, 4, 4096 + 2048, 32),
    ],
)
def test_little_work_for_few_rows_takes_16_columns_at_a_time(dim, group, queries, sequences, tokens, columns):
    layout = PageLayout(CodecSpec.parse("k4v4", dim), 64)
    cut = shape.shape_on(replace(HOPPER_GPU, multiprocessors=132), layout, group, queries, tokens, 8 * sequences)
    assert cut is not None
    assert cut.columns == columns
    assert cut.roles == (columns > 16)


@pytest.mark.parametrize(("dim", "tiles", "stages"), [(80, 8, 3), (96, 4, 4), (112, 4, 4)])
def test_steps_that_fit_only_twice_are_shorter(dim, tiles, stages, as_if_long):
    layout = PageLayout(CodecSpec.parse("k8v8", dim), 64)
    cut = shape.shape_on(replace(HOPPER_GPU, multiprocessors=132), layout, 4, 8, 16384, 128)
    assert cut is not None
    assert (cut.roles, cut.tiles, cut.stages) == (True, tiles, stages)


@emulated
@pytest.mark.parametrize("case", WARPGROUP_CASES[2:4], ids=str)
def test_products_of_warpgroups_for_keys_and_values(case, as_if_long, monkeypatch):
    monkeypatch.setattr(shape, "_PAIRS", ())
    check_emulated(case, replace(HOPPER_GPU, multiprocessors=4))  # shapes are kept by device


@emulated
def test_a_token_that_is_not_a_number_among_many_columns(as_if_long):
    built = build(replace(DRAFTS, dim=64, lens=(300, 200), queries=(8, 8)), CPU)
    block, place = divmod(int(built.positions(0)[296]), built.layout.block_size)
    field = built.layout.key.field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF  # what a kernel writes for a key that is not a number
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), HOPPER_GPU, launch)
    assert out[4:8].isnan().any(-1).all()
    assert out[:4].isfinite().all()
    assert out[8:].isfinite().all()


# Short sequences: a block has all keys of a head, or a cluster's blocks: seven of few warps, two of many, or sixteen.
CLUSTER_GPU = replace(SMALL_GPU, multiprocessors=7, clusters=True, one_launch=True)
CLUSTER_CASES = [
    *(replace(TINY, lens=(length,), queries=(1,)) for length in (0, 1, 17, 137, 700)),
    replace(TINY, lens=(300,), queries=(4,), group=3, sinks=True),
    replace(TINY, lens=(90,), queries=(3,), num_kv_heads=2, dim=128, format="k5v3"),
    replace(TINY, **EVERYTHING | {"lens": (700,), "queries": (2,)}),
    replace(TINY, lens=(500,), queries=(1,), num_kv_heads=3, group=8, dim=256, page=64),
    replace(TINY, lens=(500, 0, 90), queries=(1, 1, 1)),
    replace(TINY, lens=(40, 200), queries=(2, 4), group=4, padding=3),
    replace(TINY, lens=(300,), queries=(1,), dim=80, format="k3v5"),
    replace(TINY, lens=(300,), queries=(2,), dim=112, group=7),
]
WHOLE_CASES = [
    *(replace(TINY, format=f, lens=(128, 9, 0, 1), queries=(1,) * 4) for f in ("k4v4", "k5v3", "k2v6")),
    replace(TINY, dim=128, lens=(128, 77), num_kv_heads=3),
    replace(TINY, dim=112, format="k3v3", lens=(128, 9, 0, 1), queries=(1,) * 4),
    replace(TINY, dim=96, format="k5v4", lens=(60, 30), queries=(2, 3), group=3, sinks=True),
    replace(TINY, lens=(60, 3, 0, 21), queries=(4, 2, 1, 3), group=3, sinks=True),
    replace(TINY, lens=(60, 30), queries=(0, 1), group=8, dim=256, page=64, padding=2),
    replace(VERIFY, **EVERYTHING | {"lens": (90, 700, 4, 1), "queries": (1, 2, 1, 1), "window": 20}),
]


def check_one_launch(case: Case, device: shape.Device) -> int:
    """Returns the blocks of a cluster."""
    launched = []

    def once(name, defines, *rest):
        launched.append((name, defines["CLUSTER"]))
        launch(name, defines, *rest)

    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), device, once)
    assert len(launched) == 1
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)
    return launched[0][1]


@emulated
@pytest.mark.parametrize("warps", [4, 16])
@pytest.mark.parametrize("case", CLUSTER_CASES, ids=str)
def test_one_launch_of_clusters(case, warps, monkeypatch):
    monkeypatch.setattr(shape, "_ROUNDS_OF_ONE", -1)
    if warps == 16:
        monkeypatch.setattr(shape, "_CLUSTER", 2)
    assert check_one_launch(case, CLUSTER_GPU) > 1


@emulated
@pytest.mark.parametrize("case", CLUSTER_CASES[3:5], ids=str)
def test_one_launch_of_the_largest_clusters(case):
    assert check_one_launch(case, replace(CLUSTER_GPU, multiprocessors=20)) == 16


@emulated
@pytest.mark.parametrize("case", WHOLE_CASES, ids=str)
def test_one_launch_of_a_block_for_every_head(case):
    assert check_one_launch(case, replace(CLUSTER_GPU, clusters=False)) == 1


# Levels from tables in shared memory: small blocks that share a multiprocessor, in one launch and in two, and clusters.
SHORT = replace(TINY, dim=128, page=64, num_kv_heads=2, lens=(700, 90, 0, 1, 130), queries=(1,) * 5)


@emulated
@pytest.mark.parametrize("device", [SMALL_GPU, replace(CLUSTER_GPU, clusters=False)], ids=["merged", "whole"])
@pytest.mark.parametrize(
    ("format", "cut"), [("k5v5", (1, 3)), ("k7v7", (1, 3)), ("k6v4", (2, 2)), ("k8v8", (1, 2)), ("k4v5", (1, 3))]
)
def test_blocks_that_share_a_multiprocessor(format, cut, device, monkeypatch):
    monkeypatch.setattr(shape, "_TINY_TOKENS", 0)
    case = replace(SHORT, format=format)
    chosen = shape.shape_on(device, build(case, CPU).layout, case.group, 1, 700, 10)
    assert chosen is not None
    assert (chosen.warps, chosen.stages, chosen.resident) == (4, *cut)
    if device.one_launch:
        check_one_launch(case, device)
    else:
        check_emulated(case, device)


@emulated
@pytest.mark.parametrize("format", ["k4v4", "k5v5"])
def test_blocks_of_eight_columns_that_share_a_multiprocessor(format, monkeypatch):
    monkeypatch.setattr(shape, "_TINY_TOKENS", 0)
    cuts = []
    monkeypatch.setattr(attend_cuda, "in_one_launch", lambda *args: cuts.append(shape.in_one_launch(*args)) or cuts[-1])
    check_one_launch(replace(SHORT, format=format, group=7), replace(CLUSTER_GPU, clusters=False, multiprocessors=6))
    assert [(cut.columns, cut.warps, cut.stages, cut.resident) for cut in cuts] == [(8, 4, 1, 3)]


@emulated
@pytest.mark.parametrize(("format", "dim"), [("k5v5", 128), ("k6v6", 128), ("k5v5", 64)])
def test_clusters_with_one_slot(format, dim, monkeypatch):
    monkeypatch.setattr(shape, "_TINY_TOKENS", 0)
    case = replace(SHORT, format=format, dim=dim, num_kv_heads=1, lens=(900, 0, 130), queries=(1,) * 3)
    assert check_one_launch(case, CLUSTER_GPU) == 2


@pytest.mark.parametrize(
    ("lens", "queries", "launches"), [((137,), (1,), 1), ((4000,), (1,), 2), ((200,) * 3, (40, 1, 1), 2)]
)
def test_of_long_sequences_and_beside_a_prefill_there_are_two_launches(lens, queries, launches):
    names: list[str] = []
    built = build(replace(TINY, lens=lens, queries=queries), CPU)
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), CLUSTER_GPU, lambda name, *_: names.append(name))
    assert len(names) == launches


@pytest.mark.parametrize(("rows", "warps"), [(64, 8), (128, 12), (256, 4), (96, 4)])
def test_blocks_of_few_warps_are_for_short_sequences_that_do_not_share_evenly(rows, warps):
    layout = PageLayout(CodecSpec.parse("k4v4", 96), 64)
    cut = shape.shape_on(replace(LARGE_GPU, multiprocessors=132), layout, 4, 1, 8192, rows)
    assert cut is not None
    assert cut.warps == warps


@pytest.mark.parametrize(
    ("format", "dim", "tokens", "tiles", "warps"),
    [
        *(("k2v2", 64, 4096, 4, 4), ("k2v2", 64, 8192, 8, 12), ("k2v2", 128, 16384, 8, 12), ("k2v2", 256, 8192, 4, 4)),
        *(("k1v1", 128, 4096, 4, 4), ("k1v1", 128, 8192, 16, 8), ("k1v1", 192, 32768, 8, 8), ("k3v3", 64, 8192, 4, 4)),
    ],
)
def test_of_few_bits_sequences_are_short_by_their_tokens(format, dim, tokens, tiles, warps):
    layout = PageLayout(CodecSpec.parse(format, dim), 64)
    cut = shape.shape_on(replace(LARGE_GPU, multiprocessors=132), layout, 4, 1, tokens, 512)
    assert cut is not None
    assert (cut.tiles, cut.warps) == (tiles, warps)


@emulated
@pytest.mark.parametrize(
    ("dim", "value_dim", "name"), [(64, None, "merge_cuts"), (80, None, "merge_cuts"), (32, 80, "merge")]
)
def test_of_many_items_only_what_is_cut_is_merged(dim, value_dim, name):
    """Where a block writes the output of whole items itself: head size 80 takes the queries' memory for that."""
    names: list[str] = []
    case = replace(TINY, dim=dim, value_dim=value_dim, lens=(9, 0, 70) * 5, queries=(1,) * 15)

    def named(name, *rest):
        names.append(name)
        launch(name, *rest)

    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, named)
    assert names == ["attend", name]
    check_rows(built, out, lse, lambda count: True)


# How work is cut: nine blocks on the small device, 96 on the large one.
LARGE_GPU = replace(SMALL_GPU, multiprocessors=32)
CUTS = [
    (replace(TINY, lens=(1300, 9, 30, 64, 5), queries=(1,) * 5), SMALL_GPU),  # one long: blocks go on to other items
    (replace(TINY, num_kv_heads=2, lens=(600, 640), queries=(1, 1)), SMALL_GPU),  # alike: two blocks for every item
    (replace(TINY, lens=(*range(100, 138), 0, 1), queries=(1,) * 40), LARGE_GPU),  # beyond a warp's lanes
    (replace(TINY, lens=(3000, *range(40)), queries=(1,) * 41), LARGE_GPU),
    (replace(VERIFY, lens=(300, 280, 310), queries=(5, 2, 4)), LARGE_GPU),
    (replace(VERIFY, lens=(0, 30, 2, 700, 64) * 5, queries=(2, 3, 2, 36, 1) * 5), SMALL_GPU),  # more items than blocks
]


@emulated
@pytest.mark.parametrize(("case", "device"), CUTS, ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_how_work_is_cut(case, device, monkeypatch):
    monkeypatch.setattr(shape, "_TINY_TOKENS", 0)
    check_emulated(case, device)


@emulated
def test_a_gpu_with_less_shared_memory():
    check_emulated(replace(TINY, dim=256, format="k6v6", lens=(40,), queries=(1,)), OLD_GPU)


@emulated
@pytest.mark.parametrize(("queries", "format"), [(1, "k4v4"), (3, "k4v4"), (1, "k5v6")])
def test_a_marked_token_gives_nan_to_who_sees_it_only(queries, format):
    built = build(replace(TINY, format=format, lens=(200, 20), queries=(queries, 1)), CPU)
    at = 5 if queries == 1 else 198  # far from any mask, or seen by the last two queries only
    block, place = divmod(int(built.positions(0)[at]), built.layout.block_size)
    field = built.layout.key.field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF  # what a kernel writes for a key that is not a number
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, launch)
    seen = 0 if queries == 1 else 1
    assert out[seen:queries].isnan().any(-1).all()
    assert out[:seen].isfinite().all()
    assert out[queries:].isfinite().all()


@emulated
def test_results_do_not_depend_on_the_other_sequences():
    """Steps begin at fixed tokens, so only the order of a few additions may differ."""
    built, together, _ = run_emulated(replace(TINY, lens=(300, 9, 150), queries=(1, 1, 1)))
    batch = built.batch
    for i in range(3):
        one = replace(
            batch,
            block_table=batch.block_table[i : i + 1],
            seq_lens=batch.seq_lens[i : i + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        )
        alone = replace(built, batch=one, query=built.query[i : i + 1])
        out = torch.full_like(together[i : i + 1], torch.nan)
        attend_cuda.attend_packed(request_of(alone, out, torch.empty(1, 4)), SMALL_GPU, launch)
        assert torch.allclose(out, together[i : i + 1], rtol=1e-5, atol=1e-6)


def test_a_workspace_that_is_too_small_is_refused():
    built = build(TINY, CPU)
    out, lse = poisoned_out(TINY, built)
    request = request_of(built, out, lse, torch.empty(1000, dtype=torch.uint8))
    with pytest.raises(InputError, match="workspace must be uint8 with at least"):
        attend_cuda.attend_packed(request, SMALL_GPU, launch)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(TINY, format="krawbf16v4"), "key format rawbf16 is not one of its formats"),
        (replace(TINY, dim=272), "key head size 272 is beyond 256"),
        (replace(TINY, group=33), "33 query heads per KV head are more than 32"),
        (replace(TINY, dim=256, group=17), "17 query heads per KV head are more than 16"),
        (replace(TINY, fresh=True), "codes only, not fresh K and V"),
        (replace(TINY, dim=16, lens=(40,), queries=(33,)), "prefill at head sizes 16/16 is beyond the Triton kernels"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    request = request_of(built, *poisoned_out(case, built))
    assert reason in attend_cuda.supports(request)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_it_compiles_for_every_architecture(architecture, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 16)
    cut = shape.Shape(1, False, 2, 4, 2, 1)
    defines = kernel_defines(layout, cut, 1, 1, False, False)
    code = compile_kernels(attend_cuda.SOURCE, defines, architecture, tmp_path)
    assert code[:4] == b"\x7fELF"
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])  # a file that was cut off is noticed, not used
    assert compile_kernels(attend_cuda.SOURCE, defines, architecture, tmp_path) == code


def test_shared_memory_of_every_shape_fits_its_device():
    for format in ("k4v4", "k2v2", "k8v8", "fp8"):
        for dim in (64, 128, 256):
            layout = PageLayout(CodecSpec.parse(format, dim), 64)
            for device in (SMALL_GPU, OLD_GPU):
                for queries in (1, 2, 8):
                    cut = shape.shape_on(device, layout, 4, queries, 1 << 15)
                    if cut is None:  # then the kernel is not used
                        assert format == "k8v8" or dim == 256
                        assert device is OLD_GPU
                        continue
                    assert shape.shared_bytes(layout, cut) <= device.shared_of_block
                    assert cut.columns >= 4


def taken(case: Case) -> bool:
    spec = case.spec
    wide = max(spec.key_dim, spec.value_dim) > 128
    return (
        Kind.RAW not in (spec.key.kind, spec.value.kind)
        and max(spec.key_dim, spec.value_dim) <= 256
        and case.group <= (16 if wide else 32)
        and not case.fresh
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LONG_CASES, *filter(taken, MATRIX[::5])], ids=str)
def test_the_shapes_for_long_sequences_on_a_gpu(case, device, as_if_long):
    check(case, device, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MATRIX, *EMULATED], ids=str)
def test_attend_on_a_gpu(case, device):
    if taken(case):
        check(case, device, "cuda")
    else:
        with pytest.raises(UnsupportedError, match="with 'cuda'"):
            check(case, device, "cuda")


@pytest.mark.gpu
def test_parts_are_never_those_of_an_earlier_call(device, as_if_long):
    cases = [
        replace(LONG, page=64, lens=lens, query_norm=norm) for lens, norm in (((700, 90, 1), 1.0), ((650, 300, 7), 3.0))
    ]
    built = [build(case, device) for case in cases]
    want = [ops.attend(**one.arguments(), backend="cuda").clone() for one in built]
    torch.cuda.synchronize()
    for i in range(200):  # back to back, in the same workspace
        got = [ops.attend(**one.arguments(), backend="cuda") for one in built]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"call {i} differs"
