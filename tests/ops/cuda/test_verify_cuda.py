"""CUDA attend with more than 16 query rows: pairs of warpgroups, and teams of warps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, build
from test_attention import EVERYTHING, poisoned_out, request_of
from test_decode_cuda import (
    CPU,
    DRAFTS,
    HOPPER_GPU,
    MANY,
    OLD_GPU,
    SMALL_GPU,
    TINY,
    check_emulated,
    emulated,
    launch,
)

from slimkv.errors import InputError
from slimkv.ops.attention.cuda import decode as attend_cuda
from slimkv.ops.attention.cuda.decode_config import VERIFY as PAIRS
from slimkv.ops.attention.cuda.decode_config import VERIFY_WARPS as TEAMS
from slimkv.ops.attention.cuda.decode_config import DecodeConfig, config_for
from slimkv.ops.cuda.device import Device
from tail import sample

NO_LENGTHS = {key: value for key, value in EVERYTHING.items() if key not in ("lens", "queries")}
# Query heads per KV head, queries per sequence, query rows of a thread block.
GROUPS_QUERIES_COLUMNS = (
    *((2, 16, 32), (3, 16, 48), (5, 16, 40), (6, 16, 48), (7, 8, 64), (8, 8, 64)),
    *((12, 4, 48), (13, 4, 64), (16, 3, 48), (16, 4, 64), (40, 2, 40), (64, 1, 64)),
)
# Many rows, by pairs of warpgroups (wgmma): one for keys and one for values.
WARPGROUP_CASES = [
    *(
        replace(DRAFTS, format=f, page=page)
        for f, page in (("k4v4", 64), ("k5v6", 16), ("ku4vur8", 64), ("k4vfp8", 64))
    ),
    replace(DRAFTS, dim=80, value_dim=64, **EVERYTHING),
    replace(DRAFTS, dim=64, group=32, num_kv_heads=2, lens=(33, 300, 40, 1, 70), queries=(1,) * 5),
    replace(DRAFTS, dim=64, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"),
    replace(DRAFTS, dim=64, page=128, lens=(1300, 40), queries=(8, 7)),
    replace(DRAFTS, page=64, rising=40.0),
    *(replace(DRAFTS, format=f, page=64) for f in ("k5v5", "k4v3")),  # every two warps share a word of the values
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


# More than 32 rows: the number that takes the least time for all queries.
RAGGED = replace(MANY, lens=(700, 33, 0, 290, 17), queries=(16, 1, 1, 11, 13))
COLUMN_CASES = [
    (replace(MANY, queries=(9, 3)), 40),
    (replace(MANY, queries=(12, 9)), 48),
    (replace(MANY, queries=(13, 2), page=16), 64),
    (replace(MANY, queries=(12, 9), lens=(700, 290), rising=40.0), 48),
    (MANY, 64),
    (replace(MANY, page=128, lens=(1300, 40), dim=64), 64),
    (replace(RAGGED, dim=64, num_kv_heads=2), 64),
    (replace(MANY, queries=(31, 20), dim=64), 64),  # two work tiles
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
    (replace(MANY, dim=192, lens=(140,) * 5, queries=(8,) * 5), 32),  # most work tiles take one thread block
]
# Value slices that four warps share unevenly: the last warps have fewer or none. One or two warps read the slices that
# do not fill a word of a plane, which are stored as token rows.
UNEVEN_CASES = [
    *((replace(MANY, dim=d, queries=(q, 3), page=page), n) for d, q, page, n in ((80, 5, 16, 24), (96, 12, 64, 48))),
    (replace(MANY, dim=112), 64),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k3v5"), (96, "k5v7"), (112, "k2v6"))),
    *((replace(MANY, dim=d, queries=(8, 5), format=f), 32) for d, f in ((80, "k8v8"), (112, "k6v8"), (96, "ku4vur2"))),
    (replace(MANY, dim=112, queries=(9, 7), format="k5v5", page=16), 40),
    (replace(MANY, dim=80, queries=(13, 2), format="k4v1"), 64),
    (replace(MANY, dim=112, **NO_LENGTHS, queries=(9, 5), format="k4v3"), 40),
    (replace(RAGGED, dim=96, num_kv_heads=2, format="k1v4"), 64),
    (replace(MANY, dim=80, lens=(140,) * 5, queries=(8,) * 5), 32),  # most work tiles take one thread block
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
    """Three sequences with ``total`` queries in all."""
    built, found = build(replace(MANY, lens=(700,) * 3, queries=(16,) * 3), CPU), []
    out, lse = poisoned_out(built.case, built)
    request = request_of(built, out, lse)
    query = torch.empty(1).expand(total, *request.query.shape[1:])
    request = replace(request, query=query, max_query_len=longest)
    attend_cuda.attend_packed(request, HOPPER_GPU, lambda call: found.append(call.defines["COLUMNS"]), 32)
    assert found[0] == rows


# Without wgmma, a team of warps processes more than 16 rows: cases, and query rows per thread block.
TEAM = replace(DRAFTS, dim=256, group=6, lens=(300, 90, 7), queries=(4, 3, 1))
TEAM_CASES = [
    (TEAM, 24),
    (replace(TEAM, queries=(2, 2, 1), num_kv_heads=2), 16),
    (replace(TEAM, queries=(8, 3, 1), page=64, format="k4v6"), 48),
    (replace(TEAM, format="ku4vfp8", lens=(260, 0, 70), queries=(5, 2, 4), window=80, sinks=True, page=128), 32),
    (replace(TEAM, dim=128, group=2, queries=(30, 17, 1), softcap=3.0, dtype="fp32", strided=True, scale=-0.2), 64),
    (replace(TEAM, queries=(4, 4, 4), causal=False, key_norm=1e3, query_norm=0.5, peaked=True), 24),
    (replace(TEAM, lens=(140,) * 7, queries=(4,) * 7), 24),  # most work tiles take one thread block
    (replace(TEAM, dim=192, format="k3v5", lens=(700, 33, 0), queries=(3, 3, 2)), 16),  # two LUTs
    (replace(TEAM, dim=128, value_dim=80, format="k4v2"), 24),
    (replace(TEAM, dim=112, format="k1v7", group=4, queries=(8, 5, 1)), 32),
    (replace(TEAM, dim=64, format="k8v8", group=20, queries=(1, 1, 1)), 24),
    (replace(TEAM, dim=64, group=48, queries=(1, 2, 1)), 48),
    (replace(TEAM, lens=(700, 33, 0), rising=40.0), 24),
]


@emulated
@pytest.mark.parametrize(("case", "rows"), sample(TEAM_CASES, 2), ids=str)
def test_teams_of_warps(case, rows):
    config = config_of(case, OLD_GPU)
    assert config.source == TEAMS
    assert config.rows == rows
    check_emulated(case, OLD_GPU)


def test_without_teams_more_than_16_query_heads_are_refused():
    case = replace(TINY, group=20, dim=16)  # one slice of values, for four warps
    built = build(case, CPU)
    refusal = "no configuration fits this device for 20 query heads per KV head with k4v4 at head sizes 16/16"
    with pytest.raises(InputError, match=refusal):
        attend_cuda.attend_packed(request_of(built, *poisoned_out(case, built)), SMALL_GPU, launch)


@emulated
def test_a_token_that_is_not_a_number_among_many_rows():
    built = build(replace(DRAFTS, dim=64, lens=(300, 200), queries=(8, 8)), CPU)
    block, place = divmod(int(built.positions(0)[296]), built.layout.block_size)
    field = built.layout.key.field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF  # the mark that kernels write for a NaN key
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), HOPPER_GPU, launch)
    assert out[4:8].isnan().any(-1).all()
    assert out[:4].isfinite().all()
    assert out[8:].isfinite().all()
