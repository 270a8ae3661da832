"""CUDA attend against the definition in float64: lane by lane on a CPU, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host
import pytest
import torch
from attention_cases import Built, Case, build
from test_attention import DECODE, EVERYTHING, MATRIX, check, check_rows, poisoned_out, request_of

from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.attention import reference
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendRequest, checked_request
from slimkv.ops.attention.cuda import decode as attend_cuda
from slimkv.ops.attention.cuda.decode import KernelCall
from slimkv.ops.attention.cuda.decode_config import (
    FEW_BYTES,
    SHORT_BYTES,
    UNBOUNDED,
    DecodeConfig,
    bound_of,
    config_for,
    reachable,
    shared_bytes,
)
from slimkv.ops.attention.cuda.decode_config import VERIFY as PAIRS
from slimkv.ops.attention.cuda.decode_config import VERIFY_WARPS as TEAMS
from slimkv.ops.cuda.device import Device, record_of
from slimkv.spec import CodecSpec, Kind, PageLayout
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")
SMALL_GPU = Device(multiprocessors=3, shared_of_multiprocessor=233472, shared_of_block=232448, copy_engine=True)
OLD_GPU = Device(multiprocessors=2, shared_of_multiprocessor=102400, shared_of_block=101376)


def launch(call: KernelCall) -> None:
    library = host.compile(Path(call.source), call.defines)
    host.launch(library, call.name, grid=call.grid, threads=call.threads, shared=call.shared, args=call.args)


def captured(request: AttendRequest) -> AttendRequest:
    """As in a graph, whose bound on lengths is the model's: keys are split."""
    return replace(request, max_seq_len=1 << 20)


def run_emulated(case: Case, device=SMALL_GPU) -> tuple[Built, torch.Tensor, torch.Tensor]:
    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    request = captured(request_of(built, out, lse))
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
    *(replace(TINY, group=group) for group in (1, 3, 6, 8, 16)),
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
@pytest.mark.parametrize("case", sample(EMULATED, 3), ids=str)
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


@emulated
@pytest.mark.parametrize("case", sample(LONG_CASES, 5), ids=str)
def test_long_sequences(case):
    check_emulated(case)


# Many rows by pairs of warpgroups, whose products are those of sm_90a: one for keys and one for values.
HOPPER_GPU = replace(SMALL_GPU, warpgroups=True)
H200 = replace(HOPPER_GPU, multiprocessors=132)
NO_LENGTHS = {key: value for key, value in EVERYTHING.items() if key not in ("lens", "queries")}
# Query heads of a KV head, queries of a sequence, columns of a block.
GROUPS_QUERIES_COLUMNS = (
    *((2, 16, 32), (3, 16, 48), (5, 16, 40), (6, 16, 48), (7, 8, 64), (8, 8, 64)),
    *((12, 4, 48), (13, 4, 64), (16, 3, 48), (16, 4, 64), (40, 2, 40), (64, 1, 64)),
)
DRAFTS = replace(LONG, dim=128, lens=(700, 290, 33), queries=(8, 6, 8))
WARPGROUP_CASES = [
    *(
        replace(DRAFTS, format=f, page=page)
        for f, page in (("k4v4", 64), ("k5v6", 16), ("ku4vur8", 64), ("k4vfp8", 64))
    ),
    replace(DRAFTS, dim=80, value_dim=64, **EVERYTHING),
    replace(DRAFTS, dim=64, group=32, num_kv_heads=2, lens=(33, 300, 40, 1, 70), queries=(1,) * 5),
    replace(DRAFTS, dim=64, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"),
    replace(DRAFTS, dim=64, page=128, lens=(1300, 40), queries=(8, 7)),
    *(replace(DRAFTS, format=f, page=64) for f in ("k5v5", "k4v3")),  # two of four parts of the values share a word
]


def config_of(case: Case, device: Device = HOPPER_GPU) -> DecodeConfig:
    config = config_for(device, build(case, CPU).layout, case.group, max(case.queries))
    assert config is not None
    return config


@emulated
@pytest.mark.parametrize("case", sample(WARPGROUP_CASES, 2), ids=str)
def test_pairs_of_warpgroups(case):
    assert config_of(case).source == PAIRS
    check_emulated(case, HOPPER_GPU)


# More rows than 32: as many of them as take the least time for all queries.
MANY = replace(DRAFTS, page=64, lens=(300, 150), queries=(16, 9))
RAGGED = replace(MANY, lens=(700, 33, 0, 290, 17), queries=(16, 1, 1, 11, 13))
COLUMN_CASES = [
    (replace(MANY, queries=(9, 3)), 40),
    (replace(MANY, queries=(12, 9)), 48),
    (replace(MANY, queries=(13, 2), page=16), 64),
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
    *((replace(MANY, dim=256, group=6, queries=(q, 3)), n) for q, n in ((4, 24), (6, 40), (8, 48))),
    (replace(MANY, **NO_LENGTHS, dim=256, group=6, queries=(8, 3), format="k5v5"), 48),
    (replace(MANY, dim=256, queries=(6, 5), format="ku4vur8", key_norm=1e3, query_norm=0.5, peaked=True), 24),
    (replace(MANY, dim=192, queries=(16, 9), format="k5v4"), 32),
    (replace(MANY, dim=192, lens=(140,) * 5, queries=(8,) * 5), 32),  # most are whole in one block
]
# Value slices that four warps do not share evenly: the last ones have fewer or none. What fills no word of a plane is
# in rows of tokens, for one or two of the warps.
UNEVEN_CASES = [
    *((replace(MANY, dim=d, queries=(q, 3), page=page), n) for d, q, page, n in ((80, 5, 16, 24), (96, 12, 64, 48))),
    (replace(MANY, dim=112), 64),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k3v5"), (96, "k5v7"), (112, "k2v6"))),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k8v8"), (112, "k6v8"), (96, "ku4vur2"))),
    (replace(MANY, dim=112, queries=(9, 7), format="k5v5", page=16), 40),
    (replace(MANY, dim=80, queries=(13, 2), format="k4v1"), 64),
    (replace(MANY, dim=112, **NO_LENGTHS, queries=(9, 5), format="k4v3"), 40),
    (replace(RAGGED, dim=96, num_kv_heads=2, format="k1v4"), 64),
    (replace(MANY, dim=80, lens=(140,) * 5, queries=(8,) * 5), 32),  # most are whole in one block
    (replace(MANY, dim=80, value_dim=112, queries=(8, 5), sinks=True), 32),
    (replace(MANY, dim=128, value_dim=80, queries=(8, 5), format="k4v2"), 32),
    (replace(MANY, dim=64, value_dim=48, queries=(8, 5), format="k4v3"), 32),
    (replace(MANY, dim=160, queries=(8, 5)), 32),
]


@emulated
@pytest.mark.parametrize(("case", "rows"), sample([*COLUMN_CASES, *UNEVEN_CASES], 5), ids=str)
def test_more_rows_than_32(case, rows):
    config = config_of(case)
    assert config.source == PAIRS
    assert config.rows == rows
    check_emulated(case, HOPPER_GPU)


@pytest.mark.parametrize(
    ("longest", "total", "rows"), [(16, 48, 64), (16, 25, 64), (16, 24, 32), (12, 36, 48), (40, 300, 32)]
)
def test_one_long_draft_or_prompt_does_not_widen_the_rows_of_all(longest, total, rows):
    """Of three sequences with ``total`` queries together."""
    built, found = build(replace(MANY, lens=(700,) * 3, queries=(16,) * 3), CPU), []
    out, lse = poisoned_out(built.case, built)
    request = request_of(built, out, lse)
    query = torch.empty(1).expand(total, *request.query.shape[1:])
    request = replace(request, query=query, max_query_len=longest)
    attend_cuda.attend_packed(request, HOPPER_GPU, lambda call: found.append(call.defines["COLUMNS"]), 32)
    assert found[0] == rows


@pytest.mark.parametrize(("dim", "tokens", "stages"), [(80, 128, 3), (96, 64, 4), (112, 64, 4), (128, 64, 4)])
def test_blocks_that_fit_only_twice_are_shorter(dim, tokens, stages):
    config = config_for(H200, PageLayout(CodecSpec.parse("k8v8", dim), 64), 4, 8)
    assert config is not None
    assert (config.source, config.block_tokens, config.stages) == (PAIRS, tokens, stages)


# The configurations that serve most models, on an H200: by format, head size and query rows.
@pytest.mark.parametrize(
    ("format", "dim", "group", "queries", "config"),
    [
        ("k4v4", 128, 4, 1, DecodeConfig(4, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 8, 1, DecodeConfig(8, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 4, 4, DecodeConfig(16, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 4, 5, DecodeConfig(24, 128, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 128, 4, 8, DecodeConfig(32, 128, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 128, 4, 16, DecodeConfig(64, 128, 16, 3, source=PAIRS, bulk=True)),
        ("k5v5", 128, 4, 16, DecodeConfig(64, 64, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 96, 4, 1, DecodeConfig(4, 64, 12, 2, bulk=True)),
        ("k3v3", 112, 4, 1, DecodeConfig(4, 64, 12, 2, bulk=True)),
        ("k4v4", 64, 4, 1, DecodeConfig(4, 128, 12, 2, bulk=True)),
        ("k2v2", 128, 4, 1, DecodeConfig(4, 128, 12, 2, bulk=True)),
        ("k4v4", 256, 4, 1, DecodeConfig(4, 32, 12, 2)),
        ("k4v4", 256, 4, 2, DecodeConfig(8, 32, 8, 2)),
        ("k4v4", 256, 4, 4, DecodeConfig(16, 128, 16, 3, source=PAIRS, bulk=True)),
        ("k4v4", 256, 6, 8, DecodeConfig(48, 64, 16, 3, source=PAIRS, bulk=True)),
        ("k4v4", 256, 6, 10, DecodeConfig(32, 128, 16, 2, source=PAIRS, bulk=True)),  # twice
        ("k8v8", 256, 6, 4, DecodeConfig(24, 64, 16, 2, source=PAIRS, bulk=True)),
        ("k5v5", 128, 4, 1, DecodeConfig(4, 64, 12, 1, bulk=True)),
        ("k8v8", 128, 4, 1, DecodeConfig(4, 32, 8, 2)),
        ("fp8", 128, 4, 1, DecodeConfig(4, 32, 12, 2)),
    ],
)
def test_the_table(format, dim, group, queries, config):
    assert config_for(H200, PageLayout(CodecSpec.parse(format, dim), 64), group, queries) == config


# The same with 99 KB of shared memory and no instructions of sm_90.
@pytest.mark.parametrize(
    ("format", "dim", "group", "queries", "config"),
    [
        ("k4v4", 128, 4, 1, DecodeConfig(4, 64, 8, 1)),
        ("k4v4", 128, 8, 1, DecodeConfig(8, 32, 8, 1)),
        ("k4v4", 128, 4, 8, DecodeConfig(32, 128, 8, 1, 2, source=TEAMS)),
        ("k4v4", 256, 6, 1, DecodeConfig(8, 32, 8, 1)),
        ("k4v4", 256, 6, 4, DecodeConfig(24, 128, 8, 1, source=TEAMS)),
        ("k4v4", 256, 6, 8, DecodeConfig(48, 128, 8, 1, source=TEAMS)),
        ("k5v5", 128, 4, 1, DecodeConfig(4, 32, 12, 1)),
    ],
)
def test_the_table_of_a_smaller_gpu(format, dim, group, queries, config):
    assert config_for(OLD_GPU, PageLayout(CodecSpec.parse(format, dim), 64), group, queries) == config


@pytest.mark.parametrize(
    ("dim", "group", "bound", "config"),
    [
        (128, 4, SHORT_BYTES, DecodeConfig(4, 64, 4, 2, 3, bulk=True)),
        (128, 4, FEW_BYTES, DecodeConfig(4, 64, 4, 2, 3, bulk=True)),
        (64, 8, FEW_BYTES, DecodeConfig(8, 32, 4, 2, 2)),
        (64, 8, SHORT_BYTES, DecodeConfig(8, 64, 12, 2, bulk=True)),
        (256, 4, FEW_BYTES, DecodeConfig(4, 32, 8, 2)),
    ],
)
def test_the_table_for_short_sequences(dim, group, bound, config):
    layout = PageLayout(CodecSpec.parse("k4v4", dim), 64)
    assert config_for(H200, layout, group, 1, bound) == config
    assert config in reachable(H200, layout, group, 1, 128)


def test_only_many_short_sequences_have_a_bound():
    layout = PageLayout(CodecSpec.parse("k4v4", 128), 64)
    assert bound_of(layout, 11_000) == SHORT_BYTES
    assert bound_of(layout, 400) == FEW_BYTES
    assert bound_of(layout, 20_000) == bound_of(layout, None) == bound_of(layout, 400, few_tiles=True) == UNBOUNDED


@emulated
@pytest.mark.parametrize(
    ("change", "launches"),
    [
        ({"window": 19}, 1),
        ({"window": 19, "group": 8, "sinks": True}, 1),
        ({"window": 19, "queries": (2, 1, 1, 1, 2, 1)}, 1),
        ({"window": 19, "queries": (5, 1, 1, 1, 1, 1)}, 2),  # several chunks of a sequence
        ({"lens": (300, 7, 0, 120, 33, 250)}, 1),
        ({"lens": (4000, 7, 0, 120, 33, 250)}, 2),
        ({"lens": (40, 7, 0, 120, 33, 250), "queries": (40, 1, 1, 1, 1, 1)}, 2),  # beside a prefill
    ],
    ids=str,
)
def test_a_block_with_all_keys_of_its_tile_leaves_nothing_to_merge(change, launches):
    """A window bounds what is seen, whatever the lengths: also in a graph, which is captured for the longest."""
    case = replace(TINY, **{"lens": (1300, 700, 0, 120, 33, 250), "queries": (1,) * 6, **change})
    built, found = build(case, CPU), []
    out, lse = poisoned_out(case, built)

    def named(call):
        found.append(call.name)
        launch(call)

    attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, named)
    assert len(found) == launches
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)


# Without products of warpgroups, more rows by a team of warps: cases, and the rows of a block.
TEAM = replace(DRAFTS, dim=256, group=6, lens=(300, 90, 7), queries=(4, 3, 1))
TEAM_CASES = [
    (TEAM, 24),
    (replace(TEAM, queries=(2, 2, 1), num_kv_heads=2), 16),
    (replace(TEAM, queries=(8, 3, 1), page=64, format="k4v6"), 48),
    (replace(TEAM, format="ku4vfp8", lens=(260, 0, 70), queries=(5, 2, 4), window=80, sinks=True, page=128), 32),
    (replace(TEAM, dim=128, group=2, queries=(30, 17, 1), softcap=3.0, dtype="fp32", strided=True, scale=-0.2), 64),
    (replace(TEAM, queries=(4, 4, 4), causal=False, key_norm=1e3, query_norm=0.5, peaked=True), 24),
    (replace(TEAM, lens=(140,) * 7, queries=(4,) * 7), 24),  # most are whole in one block
    (replace(TEAM, dim=192, format="k3v5", lens=(700, 33, 0), queries=(3, 3, 2)), 16),  # two tables
    (replace(TEAM, dim=128, value_dim=80, format="k4v2"), 24),
    (replace(TEAM, dim=112, format="k1v7", group=4, queries=(8, 5, 1)), 32),
    (replace(TEAM, dim=64, format="k8v8", group=20, queries=(1, 1, 1)), 24),
    (replace(TEAM, dim=64, group=48, queries=(1, 2, 1)), 48),
]


@emulated
@pytest.mark.parametrize(("case", "rows"), sample(TEAM_CASES, 2), ids=str)
def test_teams_of_warps(case, rows):
    config = config_of(case, OLD_GPU)
    assert config.source == TEAMS
    assert config.rows == rows
    check_emulated(case, OLD_GPU)


# Where int8 products are slower than those of fp16.
B300 = record_of((10, 3), 3)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("format", "rows"), [("k4v4", 8), ("k6v4", 8), ("ku8vu8", 8), ("k5v5", 4), ("fp8", 4)])
def test_slow_int8_products_are_not_used(format, rows, group):
    for dim in (64, 128, 256):
        layout = PageLayout(CodecSpec.parse(format, dim), 64)
        for bound in (FEW_BYTES, UNBOUNDED):
            config, fast = (config_for(x, layout, group, 1, bound) for x in (B300, replace(B300, int8_rate=2.0)))
            assert config is not None
            assert config.rows == rows
            assert fast is not None
            assert fast.rows == 4


@emulated
@pytest.mark.parametrize(
    "case", sample([TINY, replace(VERIFY, format="k2v3"), replace(LONG, format="ku4vu4")], 3), ids=str
)
def test_codes_as_fp16_where_int8_is_slow(case):
    check_emulated(case, B300)


def test_without_teams_more_than_16_query_heads_are_refused():
    case = replace(TINY, group=20, dim=16)  # one slice of values, for four warps
    built = build(case, CPU)
    with pytest.raises(InputError, match="20 query heads per KV head with k4v4 at head sizes 16/16 need more"):
        attend_cuda.attend_packed(request_of(built, *poisoned_out(case, built)), SMALL_GPU, launch)


@emulated
def test_a_token_that_is_not_a_number_among_many_rows():
    built = build(replace(DRAFTS, dim=64, lens=(300, 200), queries=(8, 8)), CPU)
    block, place = divmod(int(built.positions(0)[296]), built.layout.block_size)
    field = built.layout.key.field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF  # what a kernel writes for a key that is not a number
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), HOPPER_GPU, launch)
    assert out[4:8].isnan().any(-1).all()
    assert out[:4].isfinite().all()
    assert out[8:].isfinite().all()


@emulated
@pytest.mark.parametrize(
    ("dim", "value_dim", "name"), [(64, None, "merge_cuts"), (80, None, "merge_cuts"), (32, 80, "merge")]
)
def test_of_many_items_only_what_is_cut_is_merged(dim, value_dim, name):
    """Where a block writes the output of whole items itself: head size 80 takes the queries' memory for that."""
    names: list[str] = []
    case = replace(TINY, dim=dim, value_dim=value_dim, lens=(9, 0, 70) * 5, queries=(1,) * 15)

    def named(call):
        names.append(call.name)
        launch(call)

    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    attend_cuda.attend_packed(captured(request_of(built, out, lse)), SMALL_GPU, named)
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
def test_how_work_is_cut(case, device):
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


class Emulated:
    """The backend that ``AttendRequest.run`` is given."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, request) -> None:
        attend_cuda.attend_packed(request, self.device, launch)


# What else looks at the scores of centred keys: 4 rows as bytes and as halves, 16 rows, pairs.
CENTRED = [
    *(replace(TINY, format=f, group=2, num_kv_heads=2, queries=(1, 2)) for f in ("k4v4", "k5v5")),
    replace(VERIFY, group=3, num_kv_heads=2),
    replace(DRAFTS, dim=64, num_kv_heads=2, queries=(8, 6, 8)),
    replace(MANY, dim=64, queries=(16, 9)),
]


@emulated
@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"sinks": True}, {}, {"softcap": 3.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("case", sample(CENTRED, 2), ids=str)
def test_centred_keys(case, change):
    """Soft caps, sinks and log-sum-exps see the scores of the keys as they were, as those of the reference do."""
    built = build(replace(case, **change), CPU)
    offset = torch.randn(case.num_kv_heads, case.dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    results = []
    for backend in (Emulated(HOPPER_GPU), reference):
        out, lse = poisoned_out(case, built)
        request = checked_request(**built.arguments(key_offset=offset), out=out, lse=lse)
        assert request.sees_offset
        request.run(backend)
        results.append((out, lse))
    (out, lse), (want, want_lse) = results
    rows = sum(case.queries)
    errors = (out[:rows] - want[:rows]).norm(dim=-1) / want[:rows].norm(dim=-1).clamp_min(1e-6)
    assert errors.max() <= case.bound
    empty = want_lse[:rows] == -torch.inf
    assert torch.equal(lse[:rows] == -torch.inf, empty)
    assert torch.allclose(lse[:rows][~empty], want_lse[:rows][~empty], atol=2e-3, rtol=2e-3)


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
        attend_cuda.attend_packed(captured(request_of(alone, out, torch.empty(1, 4))), SMALL_GPU, launch)
        assert torch.allclose(out, together[i : i + 1], rtol=1e-5, atol=1e-6)


def test_a_workspace_that_is_too_small_is_refused():
    built = build(TINY, CPU)
    out, lse = poisoned_out(TINY, built)
    request = captured(request_of(built, out, lse, torch.empty(1000, dtype=torch.uint8)))
    with pytest.raises(InputError, match="workspace must be uint8 with at least"):
        attend_cuda.attend_packed(request, SMALL_GPU, launch)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(TINY, format="krawbf16v4"), "key format rawbf16 is not one of its formats"),
        (replace(TINY, dim=272), "key head size 272 is beyond 256"),
        (replace(TINY, group=65), "65 query heads per KV head with"),
        (replace(TINY, dim=256, group=49), "49 query heads per KV head with"),
        (replace(TINY, fresh=True), "codes only, not fresh K and V"),
        (replace(TINY, dim=16, lens=(40,), queries=(33,)), "prefill at head sizes 16/16 is beyond the Triton kernels"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    request = request_of(built, *poisoned_out(case, built))
    assert reason in attend_cuda.supports(request)


def test_shared_memory_of_every_configuration_fits_its_device():
    for format in ("k4v4", "k2v2", "k8v8", "fp8"):
        for dim in (64, 128, 256):
            layout = PageLayout(CodecSpec.parse(format, dim), 64)
            for device in (SMALL_GPU, OLD_GPU, HOPPER_GPU):
                configs = reachable(device, layout, 4, MAX_DECODE_QUERIES)
                if not configs:  # then the kernel is not used
                    assert format == "k8v8" or dim == 256
                    assert device is OLD_GPU
                for config in configs:
                    assert shared_bytes(layout, config) * config.blocks_per_sm <= device.shared_of_multiprocessor
                    assert shared_bytes(layout, config) <= device.shared_of_block


def taken(case: Case) -> bool:
    spec = case.spec
    wide = max(spec.key_dim, spec.value_dim) > 128
    return (
        Kind.RAW not in (spec.key.kind, spec.value.kind)
        and max(spec.key_dim, spec.value_dim) <= 256
        and case.group <= (48 if wide else 64)
        and not case.fresh
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LONG_CASES, *filter(taken, MATRIX[::5])], ids=str)
def test_long_sequences_on_a_gpu(case, device):
    check(case, device, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MATRIX, *EMULATED], ids=str)
def test_attend_on_a_gpu(case, device):
    if taken(case):
        check(case, device, "cuda")
    else:
        with pytest.raises(UnsupportedError, match="with 'cuda'"):
            check(case, device, "cuda")
