"""The passes of CUDA prefill, and the choice of its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import build
from test_attention import poisoned_out, request_of
from test_prefill_cuda import CPU, LONG, config_of

from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendOptions
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.attention.cuda.prefill_workspace import Batch, plan_passes
from slimkv.ops.cuda.device import NAMED, record_of
from slimkv.spec import CodecSpec, PageLayout


def test_sequences_and_tiles_of_a_pass():
    layout, config = PageLayout(CodecSpec.parse("k4v4", 128), 16), config_of("k4v4", 128)

    def passes(sequences, blocks, max_seq_len):
        batch = Batch(sequences, 8, blocks, -(-max_seq_len // config.tile_tokens))
        return plan_passes(layout, config, batch, 132, 256 << 20)

    assert passes(1, 1, 1000) == (1, 8)
    assert passes(1, 64, 1 << 20) == (1, 512)  # 256 MiB of 64 KiB tiles, for 8 heads
    assert passes(1 << 17, 1 << 17, 1 << 20) == (1 << 17, 1)
    assert passes(32, 64, 8192) == (8, 64)  # whole sequences, two blocks of each: 128 of 132 multiprocessors are busy
    assert passes(16, 256, 8704) == (6, 68)  # passes of 6, 6 and 4 sequences rather than 7, 7 and 2
    assert passes(16, 32, 32768) == (16, 32)  # two whole sequences would have only 32 thread blocks
    assert passes(10, 110, 8192) == (6, 64)  # 4 x 132 thread blocks and then 352, rather than twice 440


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        ({}, True),
        ({"group": 64}, False),  # 2,560 rows per sequence
        ({"format": "k5v4"}, True),
        ({"format": "fp8", "dim": 96, "group": 13}, False),
        ({"format": "k5v4", "dim": 256}, False),
        ({"dim": 96, "group": 19}, True),
        ({"format": "ku4vu4", "group": 7}, True),
        ({"format": "ku4vu4", "group": 13}, False),
        ({"dim": 256, "group": 7}, True),
        ({"format": "ku4vu4", "dim": 256, "group": 7}, False),
        ({"dim": 64, "group": 13}, False),
    ],
    ids=str,
)
def test_what_is_fused(change, fused):
    case = replace(LONG, **{"dim": 128, **change})
    built = build(case, CPU)
    request = request_of(built, *poisoned_out(case, built))
    config = prefill_config.config_for(request)
    assert config.fused == fused
    assert not fused or config in prefill_config.configs(built.layout.spec, prefill_config.FUSED)


@pytest.fixture
def hopper_request(monkeypatch):
    """Makes requests with 8 KV heads and any number of long sequences, on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(prefill_config, "device_of", lambda device: record_of((9, 0), 132))

    def make(sequences, queries, tokens, *, dim=128, group=4, total=None, window=None):
        case = replace(LONG, dim=dim, num_kv_heads=8, group=group, lens=(40,), queries=(33,))
        built = build(case, CPU)
        request = request_of(built, *poisoned_out(case, built))
        return replace(
            request, query=torch.empty(1).expand(total or sequences * queries, 8 * group, dim),
            seq_lens=torch.full((sequences,), tokens, dtype=torch.int32), max_query_len=queries, max_seq_len=tokens,
            options=replace(request.options, sliding_window=window),
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("sequences", "queries", "rows"),
    [
        *((32, 32, 128), (32, 48, 256), (32, 64, 256), (32, 96, 128), (32, 128, 256)),
        *((8, 64, 256), (1, 64, 256), (1, 256, 256), (1, 512, 0)),  # few sequences: split-KV
    ],
)
def test_rows_of_blocks(sequences, queries, rows, hopper_request):
    """With 32 query heads and 8,192 tokens; 0: unpacked first."""
    config = prefill_config.config_for(hopper_request(sequences, queries, 8192))
    assert (config.rows if config.fused else 0) == rows


@pytest.mark.parametrize(
    ("tokens", "queries", "window", "fused"),
    [(24576, 512, 1024, False), (24576, 512, None, True), (4096, 64, None, True), (1024, 64, None, False)],
)
def test_splits_of_large_heads_see_enough_tokens(tokens, queries, window, fused, hopper_request):
    """With one sequence and 16 query heads of size 256; merging splits takes as long as some 500 tokens."""
    request = hopper_request(1, queries, tokens, dim=256, group=2, window=window)
    assert prefill_config.config_for(request).fused == fused


@pytest.mark.parametrize(
    ("sequences", "queries", "tokens", "change", "ahead"),
    [
        (16, 512, 8704, {}, True),
        (16, 256, 8192, {}, True),
        (32, 128, 8192, {}, False),  # unpacking takes longer than attention of four thread blocks
        (1, 2048, 131072, {}, True),
        (1, 8192, 8192, {}, True),
        (16, 512, 131072, {}, False),  # the workspace holds 4 of the 128 KV heads of all sequences
        (16, 512, 8704, {"total": 6000}, False),  # sequences of different lengths
        (16, 512, 8704, {"total": 527}, True),  # all but one decode
        (16, 512, 8704, {"dim": 256}, False),
    ],
)
def test_what_is_unpacked_ahead(sequences, queries, tokens, change, ahead, hopper_request):
    assert prefill_config.config_for(hopper_request(sequences, queries, tokens, **change)).ahead == ahead


@pytest.fixture
def as_device(monkeypatch):
    """Makes the choice use a device record."""

    def hold(name):
        record = record_of(NAMED[name], 100)
        monkeypatch.setattr(prefill_config, "device_of", lambda device: record)

    return hold


@pytest.mark.parametrize(
    ("change", "source", "decoded"),
    [
        ({}, prefill_defines.ATTEND_WARPS, MAX_DECODE_QUERIES),
        ({"dim": 256, "group": 6, "queries": (8, 3)}, prefill_defines.ATTEND_WARPS, MAX_DECODE_QUERIES),  # decode
        ({"dim": 256, "group": 6}, prefill_defines.ATTEND_WARPS, MAX_DECODE_QUERIES),  # 240 rows are unpacked first
        ({"dim": 256, "queries": (8, 3), "format": "k6v6"}, prefill_defines.ATTEND_WARPS, MAX_DECODE_QUERIES),
    ],
    ids=str,
)
def test_without_products_of_warpgroups(change, source, decoded, as_device):
    case = replace(LONG, **{"dim": 128, "lens": (140, 140), "queries": (40, 33), **change})
    built = build(case, CPU)
    request = request_of(built, *poisoned_out(case, built))
    as_device("rtx4090")
    assert prefill_config.config_for(request).source == source
    assert prefill_config.most_packed_queries(request) == decoded


EIGHT_BIT = AttendOptions(prefill="8bit")


@pytest.mark.parametrize("dim", [96, 128])
def test_decode_keeps_its_queries_from_prefill_in_8_bits(dim):
    """Also for head sizes without 8-bit prefill."""
    case = replace(LONG, dim=dim, group=8, lens=(40, 40), queries=(24, 24))
    built = build(case, CPU)
    request = replace(request_of(built, *poisoned_out(case, built)), options=EIGHT_BIT)
    assert prefill_config.most_packed_queries(request) == MAX_DECODE_QUERIES


@pytest.mark.parametrize(
    ("capability", "format", "dim"),
    [
        *(((8, 9), f, dim) for f, dim in (("k5v5", 128), ("ku4v4", 64), ("k4v4", 96))),
        *(((9, 0), f, dim) for f, dim in (("k5v5", 128), ("ku4v4", 64), ("k4v4", 96))),
        ((10, 3), "k4v4", 128),
    ],
)
def test_no_kernel_is_reachable_where_8_bits_are_refused(capability, format, dim):
    assert prefill_config.reachable(record_of(capability, 100), CodecSpec.parse(format, dim), EIGHT_BIT) == ()


def test_what_decode_leaves_to_it(monkeypatch):
    """FUSED serves 17 queries and more with over 64 query rows, if it is faster on these two multiprocessors."""

    def most(**change):
        case = replace(LONG, **{"dim": 128, "group": 4, "lens": (40, 40), "queries": (24, 24), **change})
        built = build(case, CPU)
        return prefill_config.most_packed_queries(request_of(built, *poisoned_out(case, built)))

    monkeypatch.setattr(prefill_config, "device_of", lambda device: record_of((8, 9), 2))
    assert most() == MAX_DECODE_QUERIES
    monkeypatch.undo()
    assert most() == 16
    assert most(queries=(20, 20)) == MAX_DECODE_QUERIES  # 80 of a thread block's 128 rows
    assert most(group=2) == MAX_DECODE_QUERIES  # 48 rows
    assert most(group=8) == 16
    assert most(queries=(24, 1)) == MAX_DECODE_QUERIES
    assert most(format="k6v4") == MAX_DECODE_QUERIES  # 96 of a thread block's 256 rows
    assert most(format="k6v4", group=8) == 16
    assert most(format="k6v4", dim=256) == MAX_DECODE_QUERIES
    assert most(queries=(16, 16)) == MAX_DECODE_QUERIES
    assert most(lens=(300, 40), queries=(200, 20)) == MAX_DECODE_QUERIES  # 800 rows are unpacked first
